"""Raw clips: what is read, how it comes to one channel at the encoder's rate, and what is refused in words."""

from __future__ import annotations

import io
import os
import re
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mimo_encoder_audio import WHISPER, WhisperConfig
from mimo_encoder_audio._clips import clip_size, read_clip, resampled
from mimo_encoder_audio._config import RATE, samples_of

CONFIG = WhisperConfig()
ALL = 1 << 40


def _tone(frames: int, rate: int = RATE) -> NDArray[np.float32]:
    return (np.sin(2 * np.pi * 440 * np.arange(frames) / rate) * 0.4).astype(np.float32)


def _file(wave: NDArray[Any], rate: int, format: str = "WAV", subtype: str | None = None) -> bytes:  # noqa: A002
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=format, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("format", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "FLOAT", 0),
        ("WAV", "PCM_U8", 1e-2),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.1),
    ],
)
@pytest.mark.parametrize("frames", [1, 100, 20_000])
def test_files_are_read_from_paths_and_bytes(
    format: str,  # noqa: A002
    subtype: str,
    tolerance: float,
    frames: int,
    tmp_path: Path,
) -> None:
    """Each format has its size in its header, and has as many frames when it is decoded."""
    data = _file(_tone(frames), RATE, format, subtype)
    path = tmp_path / "clip"
    path.write_bytes(data)
    raws: tuple[Any, ...] = (data, path, str(path))
    for raw in raws:
        assert WHISPER.measure(raw) == (frames, RATE)
        found = read_clip(raw, frames=ALL)
        assert found.dtype == np.float32
        assert found.shape == (frames,)
        if frames > 100 or tolerance < 0.1:
            assert np.abs(found - _tone(frames)).max() <= tolerance


def test_an_mp3_without_a_count_ends_in_silence() -> None:
    """Its length is guessed; what the guess has too much is silent, and the size stays that of the header."""
    file = io.BytesIO()
    soundfile.write(file, _tone(160_000), RATE, format="MP3", bitrate_mode="CONSTANT", compression_level=0.5)
    data = file.getvalue()
    counted = data.index(b"Info")
    frame = data[data.index(b"\xff") :][:2]
    guessed = data[data.index(frame, counted) : -100]  # and its last frame is not whole
    frames, _ = clip_size(guessed)
    found = read_clip(guessed, frames=ALL)
    assert len(found) == frames
    assert not found[-100:].any()
    assert found[-3000:-2500].any()


def test_channels_are_averaged() -> None:
    """Of a file as of a waveform, over more than one block."""
    wave = np.stack([_tone(150_000), np.full(150_000, 0.25, dtype=np.float32)], 1)
    for raw in (_file(wave, RATE, "WAV", "FLOAT"), (wave, RATE)):
        np.testing.assert_allclose(read_clip(raw, frames=ALL), wave.mean(1), atol=1e-7)
        np.testing.assert_allclose(read_clip(raw, frames=70_000), wave[:70_000].mean(1), atol=1e-7)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8, np.float64])
def test_waveforms_of_any_numbers(dtype: type) -> None:
    """Whole numbers come to -1 .. 1, with zero in the middle."""
    values = np.array([-1, -0.5, 0, 0.5])
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        values = values * ((int(limits.max) - int(limits.min) + 1) / 2) + (int(limits.max) + int(limits.min) + 1) // 2
    found = read_clip((values.astype(dtype), 8000), frames=ALL)
    np.testing.assert_array_equal(found, np.array([-1, -0.5, 0, 0.5], dtype=np.float32))


@given(frames=st.integers(1, 3000), rate=st.integers(1000, 200_000))
def test_resampling_delivers_what_the_header_promises(frames: int, rate: int) -> None:
    """As many samples as soxr makes, at least one."""
    samples = samples_of(CONFIG, (frames, rate))
    wave = np.ones(frames, dtype=np.float32)
    assert samples == max(1, len(soxr.resample(wave, rate, RATE)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once for each rate
        assert len(resampled(wave, rate=rate, to=RATE, samples=samples)) == samples


def test_another_rate_is_reported_once() -> None:
    """A tone keeps its pitch, and its rate is reported for the first such clip alone."""
    with warnings.catch_warnings(record=True) as stated:
        warnings.simplefilter("default")
        for _ in range(3):
            found = resampled(_tone(44_100, 44_100), rate=44_100, to=RATE, samples=RATE)
            resampled(_tone(8000, 8000), rate=8000, to=RATE, samples=RATE)
            resampled(_tone(RATE), rate=RATE, to=RATE, samples=RATE)
    assert [str(one.message) for one in stated] == [
        "audio clips of 44,100 Hz are resampled to 16,000 Hz",
        "audio clips of 8,000 Hz are resampled to 16,000 Hz",
    ]
    assert np.abs(found - _tone(RATE))[100:-100].max() < 1e-3


def test_clips_of_any_length_are_prepared() -> None:
    """From one sample to the whole window, at any rate; what is cut is the end."""
    cutting = WhisperConfig(too_long="cut")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for frames, rate in (
            (1, RATE),
            (1, 192_000),
            (1600, RATE),
            (4410, 44_100),
            (480_000, RATE),
            (1_323_000, 44_100),
        ):
            raw = (_tone(frames, rate), rate)
            assert WHISPER.rows(CONFIG, WHISPER.measure(raw)) == len(WHISPER.prepare(CONFIG, raw)["mel"]) // 2 - 1
        for frames, rate in ((480_001, RATE), (2_000_000, 44_100)):
            raw = (_tone(frames, rate), rate)
            assert WHISPER.rows(cutting, WHISPER.measure(raw)) == 1500
            whole = WHISPER.prepare(cutting, (raw[0][: 31 * rate], rate))["mel"]
            assert np.array_equal(WHISPER.prepare(cutting, raw)["mel"].numpy(), whole.numpy())


def test_a_clip_beyond_the_window_is_refused() -> None:
    """By its size alone, with the way out."""
    wanted = r"it takes 30\.00 s, more than the 30\.00 s .* set config\.too_long = 'cut' to lose its end"
    with pytest.raises(ValueError, match=wanted):
        WHISPER.rows(CONFIG, (480_001, RATE))
    with pytest.raises(ValueError, match=r"it takes 61\.00 s, more than the 30\.00 s"):
        WHISPER.prepare(CONFIG, (np.zeros(61 * 8000, dtype=np.float32), 8000))


def _cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"a clip of 0 bytes: it can't be read as sound: Format not recognised"),
        (b"no sound at all", r"a clip of 15 bytes: it can't be read as sound: Format not recognised"),
        (_file(np.zeros(0, dtype=np.float32), RATE), r"a clip of 44 bytes: it is empty"),
        (_cut(_file(_tone(30_000), RATE)), r"it is cut off: its header tells of 60,044 bytes, [\d,]+ are there"),
        (_cut(_file(_tone(30_000), RATE, "WAVEX")), r"it is cut off: its header tells of "),
        (_cut(_file(_tone(30_000), RATE, "FLAC")), r"a clip of [\d,]+ bytes: .*(lost sync|cut off|malformed)"),
        (_cut(_file(_tone(30_000), RATE, "MP3")), r"its header tells of 30,000 frames, [\d,]+ can be read"),
        (
            _file(_tone(30_000), RATE, "OGG", "VORBIS").replace(b"vorbis", b"vorbit"),
            r"a clip of [\d,]+ bytes: .*(format|malf)",
        ),
        (_file(_tone(100), RATE, "AU"), r"it is of the format AU, none of FLAC, MP3, OGG, RF64, WAV, WAVEX"),
        (_file(np.zeros((9, 65), dtype=np.float32), RATE), r"it has 65 channels, more than 64"),
        (_file(_tone(9), 1_000_000), r"it has 1,000,000 frames a second, more than 768,000"),
        (
            _file(np.array([0, np.nan], dtype=np.float32), RATE, "WAV", "FLOAT"),
            r"a clip of \d+ bytes: the mean of its channels at frame 1 is nan, where full scale is 1",
        ),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,  # some hold the time at which they were made
)
def test_broken_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    """In words, with a name: that of the file, or how many bytes came."""
    with pytest.raises(ValueError, match=message):
        WHISPER.prepare(CONFIG, data)
    path = tmp_path / "broken one.wav"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"'{re.escape(str(path))}': "):
        WHISPER.prepare(CONFIG, path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (([], RATE), r"not float64 of shape \(0,\) at 16000"),
        ((np.zeros((2, 2, 2)), RATE), r"not float64 of shape \(2, 2, 2\)"),
        ((np.zeros(3, dtype=complex), RATE), r"not complex128"),
        ((np.zeros(3), 0), r"at 1 to 768,000 frames a second, not float64 of shape \(3,\) at 0"),
        ((np.zeros(3),), r"a clip that is a tuple is a pair \(waveform, rate\)"),
        ((np.array([np.inf], dtype=np.float32), RATE), r"a waveform: the mean of its channels at frame 0 is inf"),
        ((np.full((9, 2), 3e38), RATE), r"a waveform: the mean of its channels at frame 0 is inf"),
        (
            (np.append(np.zeros(5000), 1e30), RATE),
            r"frame 5,000 is 1e\+30, where full scale is 1 and at most 1e\+10 is taken",
        ),
    ],
)
def test_wrong_waveforms_are_refused(raw: Any, message: str) -> None:
    """Shapes, numbers and rates that can't be a clip."""
    with pytest.raises(ValueError, match=message):
        WHISPER.prepare(CONFIG, raw)


@pytest.mark.parametrize("scale", [32_768.0, 2.0**31, 9e9])
def test_floating_clips_on_the_scale_of_whole_numbers_are_taken(scale: float) -> None:
    """As libraries that read 16 or 32 bits into floats hand them in; what comes of them is finite."""
    wave = (np.sign(_tone(30_000)) * scale).astype(np.float32)
    assert all(bool(one.isfinite().all()) for one in WHISPER.prepare(CONFIG, (wave, RATE)).values())


def test_other_values_are_refused() -> None:
    """What is no clip at all is a mistake of the dataset's author."""
    with pytest.raises(TypeError, match=r"a clip is a path, the bytes of a file or a pair .*, not int"):
        WHISPER.measure(3)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    """A missing file, a folder, and a pipe, which would wait forever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing.wav", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=rf"'{re.escape(str(path))}': there is no such file"):
            WHISPER.measure(path)


@pytest.mark.parametrize("name", ["x.raw", "x.RAW"])
def test_clips_without_a_header_are_refused(name: str, tmp_path: Path) -> None:
    """By their name, as soundfile takes them for such, whatever they hold."""
    path = tmp_path / name
    path.write_bytes(_file(_tone(100), RATE))
    for raw in (path, str(path)):
        with pytest.raises(ValueError, match=rf"'{re.escape(str(path))}': it is of the format RAW, none of FLAC, MP3"):
            WHISPER.measure(raw)
        with pytest.raises(ValueError, match=r"it is of the format RAW"):
            WHISPER.prepare(CONFIG, raw)


def test_a_header_that_lies_costs_no_memory() -> None:
    """A header of days in eight channels is refused, or found out, before anything of that size is made."""
    data = bytearray(_file(np.zeros((1000, 8), dtype=np.int16), 48_000, "FLAC"))
    data[21] |= 0x0F  # the 36 bits of STREAMINFO that count frames
    data[22:26] = b"\xff" * 4
    assert clip_size(bytes(data)) == (2**36 - 1, 48_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"it takes 1431655\.77 s, more than the 30\.00 s"):
        WHISPER.prepare(CONFIG, bytes(data))
    with pytest.raises(ValueError, match=r"a clip of 120 bytes: .*(1,000 can be read|seek)"):
        WHISPER.prepare(WhisperConfig(too_long="cut"), bytes(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 31 * 48_000 * 8 * 4 / 2


def test_a_long_file_is_decoded_only_as_far_as_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two minutes no more than the window and a second is read, block by block."""
    data = _file(np.zeros((8000 * 120, 2), dtype=np.int16), 8000)
    read: list[tuple[int, ...]] = []
    original = soundfile.SoundFile.read

    def counted(self: soundfile.SoundFile, *given: Any, **named: Any) -> Any:
        block = original(self, *given, **named)
        read.append(block.shape)
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WHISPER.prepare(WhisperConfig(too_long="cut"), data)
    assert sum(frames for frames, _ in read) == 31 * 8000
    assert max(frames for frames, _ in read) <= 2**16


@pytest.mark.parametrize("stated", [0, 0x7FFFF024, 0xFFFFFFFF])
def test_what_was_written_into_a_pipe_is_read(stated: int, tmp_path: Path) -> None:
    """Its header doesn't have its length."""
    data = _file(_tone(500), RATE)
    sizes = stated.to_bytes(4, "little")
    path = tmp_path / "clip.wav"
    path.write_bytes(data[:4] + sizes + data[8:])
    assert clip_size(path) == (500, RATE)
