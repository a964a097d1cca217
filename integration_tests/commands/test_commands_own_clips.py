"""A user's own clips beside pictures, of several rates and lengths, and errors in them that are reported once."""

from __future__ import annotations

import math
import re
import wave
from array import array
from pathlib import Path
from typing import Any

import pytest
from commands import losses, mimo, succeed, write_lines
from PIL import Image

SETTINGS = """
[run]
name = "clips"
steps = 3
global_batch = 6
micro_batch = 3
directory = "run"
evaluation_interval = 3
[data]
plugin = "jsonl"
path = "data/train.jsonl"
evaluation_path = "data/train.jsonl"
max_tokens = 96
[modules.vision]
plugin = "vit"
ranks = "1"
config = { patch = 4, channels = 3, width = 16, layers = 1, heads = 2, intermediate = 16 }
[modules.audio]
plugin = "whisper"
ranks = "0-1"
config = { mels = 8, width = 16, layers = 1, heads = 2, intermediate = 16, positions = 50, stack = 5 }
[modules.language]
plugin = "decoder"
ranks = "1-2"
tp = 2
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""

SAMPLES: list[dict[str, Any]] = [
    {"text": "nothing to hear"},
    {"audio": ["low.wav"], "text": "<audio>low"},
    {"audio": ["deep/high.wav", "low.wav"], "images": ["a.png"], "text": "<audio> over <image> and <audio>"},
    {"audio": ["deep/high.wav"], "text": "high <audio>"},
    {"images": ["a.png"], "text": "only seen <image>"},
    {"audio": ["low.wav", "low.wav"], "text": "<audio><audio>twice"},
]

ALONE = (
    *("modules.vision.ranks=0", "modules.audio.ranks=0", "modules.language.ranks=0"),
    *("modules.language.tp=1", "run.micro_batch=6"),
)


def tone(path: Path, *, hertz: float, rate: int, frames: int) -> None:
    """Write a clip of one tone."""
    samples = array("h", (int(9_000 * math.sin(2 * math.pi * hertz * frame / rate)) for frame in range(frames)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with settings and data in which everything is right."""
    (tmp_path / "data" / "deep").mkdir(parents=True)
    tone(tmp_path / "data" / "low.wav", hertz=200, rate=16_000, frames=5_000)
    tone(tmp_path / "data" / "deep" / "high.wav", hertz=900, rate=8_000, frames=6_001)
    Image.effect_noise((9, 6), 90).convert("RGB").save(tmp_path / "data" / "a.png")
    write_lines(tmp_path / "data" / "train.jsonl", SAMPLES)
    (tmp_path / "clips.toml").write_text(SETTINGS)
    return tmp_path


def test_own_clips_are_trained_on_and_evaluated(folder: Path) -> None:
    """On three processes with a grid for each module as in one; the trained model generates from a clip."""
    trained = mimo("train", "clips.toml", cwd=folder)
    assert trained.code == 0, trained.err
    assert re.search(r"^evaluation at step 3: loss .* of 6 samples exactly right\n", trained.out, re.MULTILINE)
    alone = mimo("train", "clips.toml", *ALONE, "run.directory=alone", cwd=folder)
    assert alone.code == 0, alone.err
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=1e-6)
    assert succeed("generate", "run", "--audio", "data/low.wav", "--max-tokens", "4", cwd=folder)


@pytest.mark.parametrize("kind", ["absent", "text"])
def test_a_clip_that_cannot_be_read_is_named_with_its_line(folder: Path, kind: str) -> None:
    """A file that is not there, or holds no sound, ends the run with its file, line and name."""
    (folder / "data" / "text.wav").write_text("hello")
    write_lines(folder / "data" / "train.jsonl", [*SAMPLES[:3], {"audio": [f"{kind}.wav"], "text": "<audio>"}])
    ended = mimo("train", "clips.toml", *ALONE, "run.global_batch=4", "run.micro_batch=4", cwd=folder)
    reason = {"absent": "there is no such file", "text": "it can't be read as sound"}[kind]
    assert ended.code == 3
    assert re.search(
        rf"data/train\.jsonl:4: expected an item that the whisper encoder can read, got audio 0: '.*{kind}\.wav': "
        + reason,
        ended.err,
    ), ended.err
