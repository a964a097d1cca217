"""The example that sees and hears: its four processes learn what one does, of clips that stand in for spoken ones."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from commands import here, losses, mimo, read_metrics
from PIL import Image

from mimo.data import SplitName
from mimo_dataset_spoken_digits._clips import DIGITS, clips_of

STEPS = 3
RATE = 22_050
"""Frames a second of espeak-ng."""

_RESAMPLED = "UserWarning: audio clips of 22,050 Hz are resampled to 16,000 Hz"
_SMALL = tuple(
    f"modules.{module}.config.{key}={size}"
    for module, inner in (("vision", "width"), ("audio", "width"), ("language", "hidden"))
    for key, size in ((inner, 16), ("heads", 2), ("intermediate", 24))
)
SEE_AND_HEAR = (
    "train",
    "examples/digits-see-and-hear.toml",
    *_SMALL,
    f"run.steps={STEPS}",
    "run.global_batch=12",
    "run.evaluation_interval=0",
    "optimizer.lr_warmup_steps=0",
    "logging.interval=1",
)
LAYOUTS = {
    "four": ("run.micro_batch=6",),
    "alone": (
        "run.micro_batch=12",
        "modules.vision.ranks=0",
        "modules.audio.ranks=0",
        "modules.language.ranks=0",
        "modules.language.tp=1",
    ),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as espeak-ng has left it: for each digit a tone of its own pitch and length."""
    folder = tmp_path_factory.mktemp("clips")
    tones = [RATE // 5 + digit * RATE // 40 for digit in range(len(DIGITS))]
    splits: tuple[SplitName, ...] = ("train", "evaluation")
    for split in splits:
        (folder / split).mkdir()
        spoken = clips_of(split)
        (folder / split / "index.json").write_text(
            json.dumps({clip.file: (tones[clip.digit], RATE) for clip in spoken})
        )
        for clip in spoken:
            times = np.arange(tones[clip.digit]) / RATE
            with wave.open(str(folder / split / clip.file), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes((8000 * np.sin(2 * np.pi * (300 + 70 * clip.digit) * times)).astype("<i2").tobytes())
    return folder


def test_three_modules_on_four_processes_learn_what_one_process_does(clips: Path, tmp_path: Path) -> None:
    """Losses and norms of each step agree, and the only message is that clips of espeak-ng's rate are resampled.

    Clips that are there are spoken by nobody again.
    """
    data = (f"data.folder={clips}", "data.program=no-such-speaker")
    for name, layout in LAYOUTS.items():
        ended = mimo(*SEE_AND_HEAR, *data, *layout, f"run.directory={tmp_path / name}")
        assert ended.code == 0, ended.err
        warned = [line for line in ended.err.splitlines() if not line.startswith("  ")]  # those show a line of source
        assert all(line.endswith(_RESAMPLED) for line in warned), ended.err
        assert f"see-and-hear: {STEPS} steps with {4 if name == 'four' else 1} process" in ended.out
    (ours, _), (true, _) = (read_metrics(tmp_path / name) for name in LAYOUTS)
    assert len(true) == STEPS
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    for mine, right in zip(ours, true, strict=True):
        assert mine["rows"] == right["rows"]
        assert mine["label_tokens"] == right["label_tokens"]
        assert mine["norms"].keys() == {"vision", "audio", "language"}
        assert mine["norms"] == pytest.approx(right["norms"], rel=1e-4)
    assert true[-1]["loss"] < true[0]["loss"]
    check_written(tmp_path / "alone", sorted(clips.rglob("*.wav"))[7])


def check_written(run: Path, clip: Path) -> None:
    """Have a checkpoint write on from a picture and a clip, in one process and in two, and refuse a broken clip."""
    picture, broken = run / "digit.png", run / "broken.wav"
    Image.linear_gradient("L").resize((8, 8)).save(picture)
    words = ("generate", run, "--image", picture, "--audio", clip, "--max-tokens", "6")
    written = [
        mimo(*words, *more) for more in ((), ("--tp", "2", "--text", "<image> <audio>"), ("--text", "<audio> <image>"))
    ]
    assert all(ended.code == 0 and ended.err.count(_RESAMPLED) == 1 for ended in written), written
    assert written[0].out == written[1].out != "\n"
    broken.write_bytes(b"no sound")
    ended = here("generate", run, "--audio", broken)
    assert ended.refused("--audio: expected what encoder 'whisper' can read, got something else: ", "broken.wav")
