"""Untrusted clips: size by header, samples on demand; nothing is decoded or stored beyond what the encoder hears.

A raw clip is a path, the bytes of a file, or a pair (waveform, rate): numbers in -1 .. 1, [frames] or
[frames, channels] as `soundfile.read` returns them, or whole numbers of any width.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import soundfile
    from numpy.typing import NDArray

FORMATS = ("FLAC", "MP3", "OGG", "RF64", "WAV", "WAVEX")
"""What is opened; OGG holds Vorbis or Opus. A closed list of what is common, since libsndfile knows dozens."""

MAX_CHANNELS = 64
MAX_RATE = 768_000

MAX_LEVEL = 1e10
"""Largest number of a clip: floating ones may lie above 1, and may be on the scale of whole ones of 16 or 32 bits, but
the squares of what is far above that are infinite, and so is the loss."""

_UNKNOWN = 0x7FFFF000  # from here on a RIFF header's size means that whoever wrote it, into a pipe, couldn't know it
_BLOCK = 1 << 16  # frames decoded at a time, so that channels never lie in memory all at once
_GUESSED = 2 * 1152  # by so many frames the length of an MP3 file that doesn't give it may be guessed too long


def clip_size(raw: Any) -> tuple[int, int]:
    """Return (frames, frames a second) of a raw clip from its header.

    Raises:
        ValueError: it is no clip that can be read; the text names it.
    """
    if isinstance(raw, tuple):
        wave, rate = _waveform(raw)
        return len(wave), rate
    with _opened(raw) as file:
        return file.frames, file.samplerate


def read_clip(raw: Any, *, frames: int) -> NDArray[np.float32]:
    """Return the first ``frames`` of a raw clip, its channels averaged, [frames], or all where it has fewer.

    Raises:
        ValueError: it can't be read, ends before its header says, or holds what is no number or far above 1; its name
            and the frame are in the text.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # it is reported below, once and with its place
        if isinstance(raw, tuple):
            wave, _ = _waveform(raw)
            mono = _mixed(_scaled(wave[:frames]))
        else:
            with _opened(raw) as file:
                mono = _decoded(file, min(frames, file.frames))
    heard = np.abs(mono) <= MAX_LEVEL  # false of what is no number
    if not heard.all():
        frame = int(np.argmin(heard))
        msg = (
            f"{_name(raw)}: the mean of its channels at frame {frame:,} is {mono[frame]:g}, where full scale is 1 and "
            f"at most {MAX_LEVEL:g} is taken"
        )
        raise ValueError(msg)
    return mono


def resampled(mono: NDArray[np.float32], *, rate: int, to: int, samples: int) -> NDArray[np.float32]:
    """Return a clip of ``rate`` at the rate ``to``, exactly ``samples`` of it.

    Where the rates differ it is reported as a warning, which Python shows once for each rate.
    """
    if rate != to:
        import soxr

        warnings.warn(f"audio clips of {rate:,} Hz are resampled to {to:,} Hz", stacklevel=2)
        mono = soxr.resample(mono, rate, to)
    missing = max(0, samples - len(mono))  # what rounding may leave out
    return np.pad(mono[:samples], (0, missing)).astype(np.float32, copy=False)


def _decoded(file: soundfile.SoundFile, frames: int) -> NDArray[np.float32]:
    mono = np.empty(frames, dtype=np.float32)
    at = 0
    while at < frames:
        block = file.read(min(_BLOCK, frames - at), dtype="float32", always_2d=True)
        if not len(block) and file.format == "MP3" and frames - at <= _GUESSED:
            mono[at:] = 0
            break
        if not len(block):
            msg = f"it is cut off or damaged: its header tells of {file.frames:,} frames, {at:,} can be read"
            raise ValueError(msg)
        mono[at : at + len(block)] = _mixed(block)
        at += len(block)
    return mono


@contextmanager
def _opened(raw: Any) -> Iterator[soundfile.SoundFile]:
    import soundfile  # heavy, and only who reads clips needs it

    try:
        with soundfile.SoundFile(_source(raw)) as file:
            _check(file)
            if file.format.startswith("WAV"):
                _check_length(raw)
            yield file
    except soundfile.LibsndfileError as error:
        msg = f"{_name(raw)}: it can't be read as sound: {error.error_string}"  # its other text names an object of ours
        raise ValueError(msg) from error
    except (ValueError, OSError) as error:
        msg = f"{_name(raw)}: {error}"
        raise ValueError(msg) from error


def _source(raw: Any) -> io.BytesIO | str | Path:
    if isinstance(raw, bytes):
        return io.BytesIO(raw)
    if not isinstance(raw, str | Path):
        msg = f"a clip is a path, the bytes of a file or a pair (waveform, rate), not {type(raw).__name__}"
        raise TypeError(msg)
    # Not only because a folder is no clip: opening a named pipe would wait forever.
    if not Path(raw).is_file():
        msg = "there is no such file"
        raise ValueError(msg)
    if Path(raw).suffix.lower() == ".raw":  # of which soundfile asks for what a header tells
        raise _other_format("RAW")
    return raw


def _check(file: soundfile.SoundFile) -> None:
    if file.format not in FORMATS:
        raise _other_format(file.format)
    if not 1 <= file.channels <= MAX_CHANNELS:
        msg = f"it has {file.channels} channels, more than {MAX_CHANNELS}"
    elif not 1 <= file.samplerate <= MAX_RATE:
        msg = f"it has {file.samplerate:,} frames a second, more than {MAX_RATE:,}"
    elif file.frames < 1:
        msg = "it is empty"
    else:
        return
    raise ValueError(msg)


def _check_length(raw: bytes | str | Path) -> None:
    """Refuse a RIFF file that ends before its header says: libsndfile takes what there is for the whole."""
    if isinstance(raw, bytes):
        held, header = len(raw), raw[:8]
    else:
        with Path(raw).open("rb") as opened:
            held, header = os.fstat(opened.fileno()).st_size, opened.read(8)
    stated = int.from_bytes(header[4:], "little" if header[:4] == b"RIFF" else "big")
    if held < stated < _UNKNOWN:  # it counts all but these eight bytes; some writers count them too
        msg = f"it is cut off: its header tells of {stated + 8:,} bytes, {held:,} are there"
        raise ValueError(msg)


def _other_format(found: str) -> ValueError:
    return ValueError(f"it is of the format {found}, none of {', '.join(FORMATS)}")


def _waveform(raw: tuple[Any, ...]) -> tuple[NDArray[Any], int]:
    try:
        values, rate = raw
        wave, whole = np.asarray(values), int(rate)
    except (TypeError, ValueError) as error:
        msg = f"a clip that is a tuple is a pair (waveform, rate): {error}"
        raise ValueError(msg) from error
    if wave.ndim not in (1, 2) or wave.dtype.kind not in "fiu" or not wave.size or not 1 <= whole <= MAX_RATE:
        msg = (
            f"{_name(raw)}: it is [frames] or [frames, channels] of numbers, at 1 to {MAX_RATE:,} frames a second, "
            f"not {wave.dtype} of shape {wave.shape} at {rate!r}"
        )
        raise ValueError(msg)
    return wave, whole


def _scaled(wave: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as float32; whole ones come to -1 .. 1."""
    if wave.dtype.kind == "f":
        return wave.astype(np.float32, copy=False)
    limits = np.iinfo(wave.dtype)
    half = (int(limits.max) - int(limits.min) + 1) // 2
    return ((wave.astype(np.float64) - (int(limits.min) + half)) / half).astype(np.float32)


def _mixed(wave: NDArray[np.float32]) -> NDArray[np.float32]:
    return wave if wave.ndim == 1 else wave.mean(1, dtype=np.float32)


def _name(raw: Any) -> str:
    if isinstance(raw, tuple):
        return "a waveform"
    return f"a clip of {len(raw):,} bytes" if isinstance(raw, bytes) else repr(str(raw))
