"""A user's own data: pictures of any size, none, one or several in a sample, and errors in it, reported once."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import losses, mimo, read_metrics, succeed, write_lines
from PIL import Image

SETTINGS = """
[run]
name = "own"
steps = 3
global_batch = 8
micro_batch = 4
directory = "run"
evaluation_interval = 3
[data]
plugin = "jsonl"
path = "data/train.jsonl"
evaluation_path = "data/held_out.jsonl"
max_tokens = 128
[modules.vision]
plugin = "vit"
ranks = "0-1"
config = { patch = 4, channels = 3, width = 16, layers = 1, heads = 2, intermediate = 16 }
[modules.language]
plugin = "decoder"
ranks = "2-3"
tp = 2
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""

SAMPLES: list[dict[str, Any]] = [
    {"text": "no picture, näive text", "weight": 0.25},
    {"images": ["wide.png"], "text": "<image>first"},
    {"images": ["tall.png"], "text": "last <image>"},
    {"images": ["wide.png", "deep/grey.png", "tall.png"], "text": "<image><image> and <image> in one"},
    {"images": [], "text": "an empty list", "weight": 0},
    {"images": ["deep/grey.png", "deep/grey.png", "wide.png"], "text": "a <image> b <image> c <image> d"},
]
"""Samples; the same picture may come twice, and some count less, or not at all."""

ALONE = ("modules.vision.ranks=0", "modules.language.ranks=0", "modules.language.tp=1", "run.micro_batch=8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with settings and data in which everything is right."""
    rng = random.Random(0)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name, mode, size in [
        ("wide.png", "RGB", (21, 6)),
        ("tall.png", "RGBA", (5, 17)),
        ("deep/grey.png", "L", (8, 8)),
    ]:
        pixels = bytes(rng.randrange(256) for _ in range(size[0] * size[1] * len(mode)))
        Image.frombytes(mode, size, pixels).save(tmp_path / "data" / name)
    write_lines(tmp_path / "data" / "train.jsonl", SAMPLES * 2)
    write_lines(tmp_path / "data" / "held_out.jsonl", SAMPLES[:4])
    (tmp_path / "own.toml").write_text(SETTINGS)
    return tmp_path


def test_own_pictures_and_texts_are_trained_and_evaluated_on(folder: Path) -> None:
    """On four processes with a grid for each module as in one; the held-out file then has the same evaluation."""
    out = succeed("train", "own.toml", cwd=folder)
    evaluations = re.findall(r"^evaluation at step 3: loss .* of 4 samples exactly right\n", out, re.MULTILINE)
    assert len(evaluations) == 1
    assert succeed("evaluate", "run", cwd=folder) == evaluations[0]
    succeed("train", "own.toml", *ALONE, "run.directory=alone", cwd=folder)
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=1e-6)
    steps, _ = read_metrics(folder / "run")
    assert all(0 < step["label_weight"] <= step["label_tokens"] for step in steps)
    assert any(step["label_weight"] < step["label_tokens"] for step in steps)  # those with a sample that counts less


def unreadable(data: Path, samples: list[dict[str, Any]]) -> str:
    """Damage the pixels behind a good header."""
    whole = (data / "wide.png").read_bytes()
    (data / "torn.png").write_bytes(whole[: len(whole) // 2])
    samples[3]["images"][0] = "torn.png"
    return r"data/train\.jsonl:4: expected an item that can be read, got 'torn\.png': "


def too_few_placeholders(_data: Path, samples: list[dict[str, Any]]) -> str:
    """Write one placeholder for two images."""
    samples[2]["images"] = ["tall.png", "wide.png"]
    return (
        r"data/train\.jsonl:3: expected one placeholder <image> for each item of modality 'image', got 1 in .* for 2 in"
    )


def parent(data: Path, samples: list[dict[str, Any]]) -> str:
    """Climb out of the folder."""
    (data.parent / "secret.png").write_bytes((data / "wide.png").read_bytes())
    samples[1]["images"] = ["../secret.png"]
    return (
        r"data/train\.jsonl:2: expected paths relative to the file and inside its folder .*, "
        r"got '\.\./secret\.png'"
    )


def absolute(data: Path, samples: list[dict[str, Any]]) -> str:
    """Name a good image by its absolute path."""
    samples[1]["images"] = [str(data / "wide.png")]
    return r"data/train\.jsonl:2: expected paths relative to the file .*, got '/.*wide\.png', which leaves it"


def symlink(data: Path, samples: list[dict[str, Any]]) -> str:
    """Link to a picture outside."""
    (data.parent / "secret.png").write_bytes((data / "wide.png").read_bytes())
    (data / "link.png").symlink_to(data.parent / "secret.png")
    samples[1]["images"] = ["link.png"]
    return r"data/train\.jsonl:2: expected paths relative to the file .*, got 'link\.png', which leaves it"


@pytest.mark.parametrize(
    "damage",
    [
        unreadable,
        too_few_placeholders,
        symlink,
        pytest.param(parent, marks=pytest.mark.soak),
        pytest.param(absolute, marks=pytest.mark.soak),
    ],
)
def test_bad_data_ends_every_rank_with_file_and_line(
    damage: Callable[[Path, list[dict[str, Any]]], str], folder: Path
) -> None:
    """At first use: code 3, no process left, the reason once on stderr and in the run directory, no traceback."""
    samples = json.loads(json.dumps(SAMPLES))
    reason = damage(folder / "data", samples)
    write_lines(folder / "data" / "train.jsonl", samples)
    ended = mimo("train", "own.toml", cwd=folder)
    assert ended.code == 3, ended
    assert re.fullmatch(rf"mimo: (.* waited .*\n)*rank [0-3]: {reason}.*\n", ended.err), ended.err
    assert (folder / "run" / "error.txt").read_text() == ended.err.removeprefix("mimo: ")
