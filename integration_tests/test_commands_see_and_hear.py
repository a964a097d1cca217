"""The example that sees and hears: its four processes learn what one does, of clips that a stand-in speaks."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
from commands import losses, mimo, read_metrics

from mimo_dataset_spoken_digits._clips import DIGITS

STEPS = 3
RATE = 22_050
"""Frames a second of espeak-ng."""

# Speaks as espeak-ng is asked to: a clip for each word made beforehand, behind which come voice and speed.
_SPEAKER = """#!/bin/sh
echo >> {folder}/asked
cp "{folder}/$9" "$8"
printf %s "$2 $4" >> "$8"
"""

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
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that stands in for espeak-ng: a tone for each digit, of its own pitch and length."""
    folder = tmp_path_factory.mktemp("speaker")
    for digit, word in enumerate(DIGITS):
        times = np.arange(RATE // 5 + digit * RATE // 40) / RATE
        with wave.open(str(folder / word), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((8000 * np.sin(2 * np.pi * (300 + 70 * digit) * times)).astype("<i2").tobytes())
    program = folder / "speaker"
    program.write_text(_SPEAKER.format(folder=folder))
    program.chmod(0o755)
    return program


def test_three_modules_on_four_processes_learn_what_one_process_does(speaker: Path, tmp_path: Path) -> None:
    """Losses and norms of each step agree, and nothing is told but that clips of espeak-ng's rate are resampled.

    Each clip is spoken once for both runs.
    """
    data = (f"data.folder={tmp_path / 'clips'}", f"data.program={speaker}")
    for name, layout in LAYOUTS.items():
        ended = mimo(*SEE_AND_HEAR, *data, *layout, f"run.directory={tmp_path / name}")
        assert ended.code == 0, ended.err
        warned = [line for line in ended.err.splitlines() if not line.startswith("  ")]  # those show a line of source
        assert all(line.endswith(_RESAMPLED) for line in warned), ended.err
        assert f"see-and-hear: {STEPS} steps with {4 if name == 'four' else 1} process" in ended.out
    assert len((speaker.parent / "asked").read_text()) == 1600 + 240
    (ours, _), (true, _) = (read_metrics(tmp_path / name) for name in LAYOUTS)
    assert len(true) == STEPS
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    for mine, right in zip(ours, true, strict=True):
        assert mine["rows"] == right["rows"]
        assert mine["label_tokens"] == right["label_tokens"]
        assert mine["norms"].keys() == {"vision", "audio", "language"}
        assert mine["norms"] == pytest.approx(right["norms"], rel=1e-4)
    assert true[-1]["loss"] < true[0]["loss"]
