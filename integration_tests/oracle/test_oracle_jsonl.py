"""Two encoders of pictures and one of clips, each under a modality of its own name, fed from a jsonl file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import synthetic
from cases import Modules
from commands import here, mimo, succeed, write_lines
from oracle import Oracle
from PIL import Image
from tables import EVEN_EPS, Table, table
from test_oracle import SP, on
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_mixed import ENCODERS
from test_oracle_radio import CONFIGS as RADIO

KEYS = {"vision": "image", "radio": "radio", "audio": "voice"}
"""The modality that each module reads."""
LAYOUTS: Mapping[str, Modules] = {
    "radio tp2 sp, vision lanes 2, language pp2": {
        "vision": on(0, 1),
        "radio": on(2, 3, tp=2, **SP),
        "language": on(4, 5, pp=2),
    },
    "radio cp2 and vision pp2, colocated with language tp2": {
        "vision": on(0, 1, pp=2),
        "radio": on(0, 1, cp=2),
        "language": on(0, 1, tp=2, **SP),
    },
    "radio lanes 3 to 2, voices beside it": {
        "vision": on(0, 0),
        "radio": on(0, 2),
        "audio": on(1, 2, tp=2),
        "language": on(1, 2),
    },
}


def write_samples(folder: Path) -> Path:
    """Write 24 samples with up to two items of each modality anywhere in the text, and return their file."""
    rng, noise = random.Random(3), np.random.default_rng(3)
    names: dict[str, list[str]] = {"image": [], "radio": [], "voice": []}
    for index in range(4):
        for modality in ("image", "radio"):
            names[modality].append(f"{modality}{index}.png")
            pixels = noise.integers(0, 256, (rng.randint(2, 9), rng.randint(2, 9), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / names[modality][-1])
        names["voice"].append(f"{index}.wav")
        soundfile.write(folder / names["voice"][-1], noise.uniform(-1, 1, rng.randint(400, 3000)), 16_000)
    lines = []
    for _ in range(24):
        chosen = {modality: rng.choices(files, k=rng.randint(0, 2)) for modality, files in names.items()}
        words = [*rng.choices(synthetic.WORDS, k=rng.randint(1, 7))]
        for modality, files in chosen.items():
            for _file in files:
                words.insert(rng.randint(0, len(words)), f"<{modality}>")
        others = {modality: files for modality, files in chosen.items() if modality != "image" and files}
        lines.append({"images": chosen["image"], "items": others, "text": " ".join(words)})
    write_lines(folder / "train.jsonl", lines)
    return folder / "train.jsonl"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the samples."""
    return write_samples(tmp_path_factory.mktemp("samples"))


def settings_of(layout: str, samples: Path) -> Table:
    """Return the settings of a layout that reads all samples in each step."""
    plugins: Mapping[str, Mapping[str, Any]] = {
        "vision": ENCODERS["vision"][0],
        "radio": {"plugin": "radio", "config": RADIO["class tokens kept"]},
        "audio": {"plugin": "whisper", "config": WHISPER["clips alone"]},
        "language": {},
    }
    grids = {"audio": on(0, 0), **LAYOUTS[layout]}
    modules = {name: {**plugins[name], **keys} for name, keys in grids.items()}
    settings = table(modules, microbatches=2, eps=EVEN_EPS)
    for name, modality in KEYS.items():
        settings["modules"][name]["modality"] = modality
    settings["data"] = {"plugin": "jsonl", "path": str(samples)}
    return settings


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if "sp" in layout else pytest.mark.soak) for layout in LAYOUTS]
)
def test_a_file_feeds_two_encoders_of_pictures(layout: str, samples: Path, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, whatever the names of the modalities."""
    assert oracle.check(settings_of(layout, samples)) == ""


SETTINGS = """
[run]
name = "two"
steps = 2
global_batch = 8
micro_batch = 4
directory = "run"
evaluation_interval = 2
[data]
plugin = "jsonl"
path = "train.jsonl"
evaluation_path = "train.jsonl"
max_tokens = 256
[modules.vision]
plugin = "siglip"
ranks = "0"
config = {{ patch = 2, width = 16, layers = 1, heads = 2, intermediate = 16, size = 4, table = 2 }}
[modules.radio]
plugin = "radio"
modality = "{radio}"
ranks = "0-1"
config = {{ patch = 2, width = 16, layers = 1, heads = 2, intermediate = 16, positions = 3, max_patches = 12 }}
[modules.audio]
plugin = "whisper"
modality = "{voice}"
ranks = "1"
config = {{ mels = 8, width = 16, layers = 1, heads = 2, intermediate = 16, positions = 50, stack = 5 }}
[modules.language]
plugin = "decoder"
ranks = "0-1"
tp = 2
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
ALONE = tuple(f"modules.{name}.ranks=0" for name in ("vision", "radio", "audio", "language"))


@pytest.mark.soak
def test_commands_with_two_encoders_of_pictures(tmp_path: Path) -> None:
    """What two processes train is evaluated to the same words, and generates from items of each modality."""
    write_samples(tmp_path)
    (tmp_path / "two.toml").write_text(SETTINGS.format(radio="radio", voice="voice"))
    out = succeed("train", "two.toml", cwd=tmp_path)
    (evaluation,) = re.findall(r"^evaluation at step 2: .*\n", out, re.MULTILINE)
    assert succeed("evaluate", "run", cwd=tmp_path) == evaluation
    items = ("--item", "radio=radio1.png", "--item", "voice=1.wav", "--image", "image0.png")
    assert succeed("generate", "run", *items, "--max-tokens", "4", cwd=tmp_path)
    ended = here("generate", "run", "--item", "radio=1.wav", cwd=tmp_path)
    assert ended.refused("--item radio=FILE: expected what encoder 'radio' can read, got something else: it is no")


@pytest.mark.parametrize(
    ("modalities", "sample", "reason"),
    [
        (
            {"radio": "radio", "voice": "voice"},
            {"items": {"radio": ["1.wav"]}, "text": "<radio>"},
            r"an item that the radio encoder can read, got radio 0: it is no image of the formats",
        ),
        pytest.param(
            {"radio": "radio", "voice": "voice"},
            {"items": {"voice": ["radio1.png"]}, "text": "<voice>"},
            r"an item that the whisper encoder can read, got voice 0: '.*radio1\.png': it can't be read as sound",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"radio": "audio", "voice": "voice"},
            {"audio": ["1.wav"], "text": "<audio>"},
            r"an item that the radio encoder can read, got audio 0: it is no image of the formats",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_files_of_another_kind_are_refused_with_their_line(
    modalities: Mapping[str, str], sample: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    """An encoder that finds another kind of file than it reads says so, with the sample, and not how it failed."""
    write_samples(tmp_path)
    (tmp_path / "two.toml").write_text(SETTINGS.format(**modalities))
    text = json.dumps(sample)
    (tmp_path / "train.jsonl").write_text(f"{text}\n" * 8)
    ended = mimo("train", "two.toml", *ALONE, "modules.language.tp=1", "run.micro_batch=8", cwd=tmp_path)
    assert ended.code == 3
    assert re.search(rf"train\.jsonl:\d: expected {reason}", ended.err), ended.err
    assert "Traceback" not in ended.err
