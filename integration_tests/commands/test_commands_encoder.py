"""The tutorial on writing an encoder, done as a reader would: its files, its package, its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import losses, mimo, succeed
from house import ROOT, distribution_of, rooms
from written import build, files_of

TEXT = (ROOT / "docs" / "write-an-encoder.md").read_text(encoding="utf-8")
FILES = files_of(TEXT)
COMMANDS = re.findall(r"^mimo (?!plugins --check|.*tutorial).*$", TEXT, re.MULTILINE)
CHECKS = re.findall(r"^mimo plugins --check .*$", TEXT, re.MULTILINE)
TUTORIAL = ROOT / "docs" / "tutorial-encoder"
STEPS = "run.steps=3"
ALONE = ("modules.vision.ranks=0", "modules.language.ranks=0", "modules.language.tp=1", "run.directory=alone")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tutorial's files."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_tutorials_encoder_trains_on_three_lanes_as_in_one_process(folder: Path) -> None:
    """Beside a language model in two halves: a plain module that knows nothing of it gives the same losses."""
    assert set(FILES) == {"pyproject.toml", "mimo_encoder_tiles.py", "tiles.toml"}
    site = build(folder)
    shown = {}
    for command in COMMANDS:
        _, *words = command.split()
        short = [STEPS] if words[0] == "train" else []
        shown[words[0]] = succeed(*words, *short, cwd=folder, path=site)
    assert list(shown) == ["plugins", "check", "train", "evaluate"]
    assert re.search(r"mimo\.encoders +tiles +tiles +mimo-encoder-tiles +0\.1\.0", shown["plugins"])
    assert "with 5 processes" in shown["train"]
    assert shown["evaluate"] in shown["train"]
    succeed("train", "tiles.toml", STEPS, *ALONE, cwd=folder, path=site)
    assert len(losses(folder / "runs" / "tiles")) == 3
    assert losses(folder / "runs" / "tiles") == pytest.approx(losses(folder / "alone"), rel=1e-6)


def build_with_seam(folder: Path) -> Path:
    """Build the package with what the page adds for a seam."""
    (seam,) = re.findall(r"^## A seam.*?^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    source = folder / "mimo_encoder_tiles.py"
    source.write_text(f"{source.read_text()}\n\n{seam}")
    return build(folder)


def test_the_tutorials_encoder_with_a_seam_keeps_its_promises(folder: Path) -> None:
    """Its tower and its projector compute what the whole does."""
    site = build_with_seam(folder)
    (words,) = (command.split()[1:] for command in CHECKS if "tiles" in command)
    verdicts = succeed(*words, cwd=folder, path=site)
    assert "NO" not in verdicts
    assert "\nok seam: Tower and projector one after the other compute what the whole does" in verdicts


def test_the_tutorials_packed_encoder_keeps_its_promises(folder: Path) -> None:
    """Over tensor and context ranks, in stages, on both sides of its seam, and recomputed, it computes the same."""
    (packed,) = re.findall(r"^## A packed encoder.*?^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    source = folder / "mimo_encoder_tiles.py"
    source.write_text(f"{source.read_text()}\n\n{packed}")
    (words,) = (command.split()[1:] for command in CHECKS if "tiles" in command)
    verdicts = succeed(*words, cwd=folder, path=build(folder)).splitlines()
    assert not [line for line in verdicts if line.startswith("NO")]
    kept = {line.split(" ", 1)[1].partition(":")[0] for line in verdicts if line.startswith("ok ")}
    assert kept >= {"tensor ranks", "sequence parallel", "context ranks", "stages", "seam", "recompute"}


@pytest.mark.soak
def test_the_tutorials_encoder_with_dropout_drops_the_same_on_three_lanes(folder: Path) -> None:
    """As in one process, what LoRA reads of its linear included, and not what it computes without."""
    (dropping,) = re.findall(r"^## Dropout.*?^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    source = folder / "mimo_encoder_tiles.py"
    source.write_text(f"{source.read_text()}\n\n{dropping}")
    site, lora = build(folder), 'modules.vision.lora={rank=2,targets=["project"],dropout=0.3}'
    succeed("train", "tiles.toml", STEPS, lora, "modules.vision.frozen=false", cwd=folder, path=site)
    succeed("train", "tiles.toml", STEPS, lora, "modules.vision.frozen=false", *ALONE, cwd=folder, path=site)
    found = losses(folder / "runs" / "tiles")
    assert found == pytest.approx(losses(folder / "alone"), rel=1e-6)
    source.write_text(source.read_text().replace("Dropout(0.1)", "Dropout(0.0)"))
    still = (*ALONE[:-1], "run.directory=still")
    succeed("train", "tiles.toml", STEPS, lora, "modules.vision.frozen=false", *still, cwd=folder, path=build(folder))
    assert found != pytest.approx(losses(folder / "still"), rel=1e-4)


@pytest.mark.soak
def test_the_tutorials_encoder_with_a_seam_is_ahead_of_its_projector(folder: Path) -> None:
    """It trains as it does in its own step."""
    site = build_with_seam(folder)
    frozen = 'modules.vision.frozen=["tower"]'
    succeed("train", "tiles.toml", STEPS, frozen, "modules.vision.prefetch=true", cwd=folder, path=site)
    succeed("train", "tiles.toml", STEPS, frozen, "run.directory=in_step", cwd=folder, path=site)
    assert losses(folder / "runs" / "tiles") == losses(folder / "in_step")
    assert "vision.projector" in (folder / "runs" / "tiles" / "plan.json").read_text()


def test_an_encoder_whose_rows_are_not_what_it_said_is_named(folder: Path) -> None:
    """An author's likeliest mistake ends the run: modality, samples, what was promised and what came are named."""
    source = folder / "mimo_encoder_tiles.py"
    source.write_text(source.read_text().replace("-(-height // config.tile) *", "1 + -(-height // config.tile) *"))
    ended = mimo("train", "tiles.toml", STEPS, cwd=folder, path=build(folder))
    assert ended.code == 3
    assert re.fullmatch(
        r"mimo: (.* waited .*\n)*"
        r"rank [0-2]: modules\.vision: expected \d+ rows of width 32 for \d items of modality 'image', "
        r"one for each of their placeholders, as rows\(\) of encoder 'tiles' said "
        r"\(17 for item 0 of sample \d+ of size \(8, 8\), .*\), "
        r"got a tensor of shape \(\d+, 32\) from its forward\(\)\. Make them agree\.\n",
        ended.err,
    ), ended.err


@pytest.mark.soak
def test_the_encoder_around_a_published_model_trains_and_conforms(tmp_path: Path) -> None:
    """The tutorial's package, installed: on two lanes it learns as in one process, and it keeps every promise."""
    folder = tmp_path / "tutorial"
    shutil.copytree(TUTORIAL, folder)
    assert len((folder / "mimo_encoder_tutorial.py").read_text().splitlines()) < 60
    site = build(folder)
    succeed("train", "tutorial.toml", STEPS, cwd=folder, path=site)
    alone = ("modules.vision.ranks=0", "modules.language.ranks=0", "run.directory=alone")
    succeed("train", "tutorial.toml", STEPS, *alone, cwd=folder, path=site)
    assert losses(folder / "runs" / "tutorial") == pytest.approx(losses(folder / "alone"), rel=1e-6)
    assert "mimo plugins --check tutorial" in CHECKS
    verdicts = succeed("plugins", "--check", "tutorial", cwd=folder, path=site).splitlines()
    assert {line.split(" ")[0] for line in verdicts} == {"ok", "-"}


def test_the_template_tests_itself(tmp_path: Path) -> None:
    """Its tests pass where it is installed."""
    folder = tmp_path / "tutorial"
    shutil.copytree(TUTORIAL, folder)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_encoder_tutorial.py"]
    environ = {**os.environ, "PYTHONPATH": str(build(folder))}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_template_installs_what_it_declares() -> None:
    """The folders in its noxfile are all of mimo that its encoder needs, and no more."""
    needed = re.findall(
        r"\w+", re.findall(r"^NEEDED = \((.*)\)$", (TUTORIAL / "noxfile.py").read_text(), re.MULTILINE)[0]
    )
    members = {room.name: room for room in rooms()}
    project = tomllib.loads((TUTORIAL / "pyproject.toml").read_text())["project"]
    open_ends = [name for name in map(distribution_of, project["dependencies"]) if name in members]
    found: set[str] = set()
    while open_ends:
        found.add(name := open_ends.pop())
        open_ends += [one for one in members[name].declared()[0] if one in members and one not in found]
    assert {members[name].folder.name for name in found} == set(needed)


def test_the_kit_names_the_promise_that_an_encoder_breaks(folder: Path) -> None:
    """The page's own check: all is well, and after an author's likeliest mistake the command ends with 1."""
    site = build(folder)
    (words,) = (command.split()[1:] for command in CHECKS if "tiles" in command)
    assert "NO" not in succeed(*words, cwd=folder, path=site)
    source = site / "mimo_encoder_tiles.py"
    source.write_text(source.read_text().replace("-(-height // config.tile) *", "1 + -(-height // config.tile) *"))
    ended = mimo(*words, cwd=folder, path=site)
    assert ended.code == 1
    assert "\nNO rows: forward() returns as many rows of an item as rows() says" in ended.out
    assert "\n   item 0 of size (64, 64) became a tensor of shape (64, 24), expected (65, 24)\n" in ended.out
