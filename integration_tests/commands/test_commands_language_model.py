"""The page on writing a language model, followed as its reader would: its files, its package, its commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import losses, mimo, succeed
from house import ROOT

TEXT = (ROOT / "docs" / "write-a-language-model.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.-]+)`\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^mimo (?!plugins --check).*$", TEXT, re.MULTILINE)
CHECKS = re.findall(r"^mimo plugins --check .*$", TEXT, re.MULTILINE)
STEPS = "run.steps=3"
ALONE = ("modules.language.tp=1", "modules.language.sequence_parallel=false", "modules.language.ranks=0")


def build(folder: Path) -> Path:
    """Write the page's files, build its package, and return a folder into which it is installed."""
    for name, content in FILES.items():
        (folder / name).write_text(content)
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_pages_language_model_trains_in_each_of_its_layouts_as_in_one_process(tmp_path: Path) -> None:
    """Over tensor ranks that split rows, and over stages that recompute: the same losses."""
    assert set(FILES) == {"pyproject.toml", "mimo_language_parallel.py", "parallel.toml"}
    site = build(tmp_path)
    shown = []
    for command in COMMANDS:
        _, *words = command.split()
        short = [STEPS] if words[0] == "train" else []
        shown.append((words[0], succeed(*words, *short, cwd=tmp_path, path=site)))
    assert [word for word, _ in shown] == ["plugins", "check", "train", "evaluate", "train"]
    assert re.search(r"mimo\.language_models +parallel +parallel +mimo-language-parallel +0\.1\.0", shown[0][1])
    assert shown[3][1] in shown[2][1]
    succeed("train", "parallel.toml", STEPS, *ALONE, "run.directory=alone", cwd=tmp_path, path=site)
    wanted = losses(tmp_path / "alone")
    assert len(wanted) == 3
    for name in ("runs/parallel", "stages"):
        assert losses(tmp_path / name) == pytest.approx(wanted, rel=1e-6), name


def test_the_kit_names_the_promise_that_a_language_model_breaks(tmp_path: Path) -> None:
    """The page's own check: all is well, and after an author's likeliest mistake the command ends with 1."""
    site = build(tmp_path)
    (words,) = (command.split()[1:] for command in CHECKS)
    verdicts = succeed(*words, cwd=tmp_path, path=site).splitlines()
    left_out = {line.split(":")[0] for line in verdicts if not line.startswith("ok ")}
    assert left_out == {f"-  {name}" for name in ("costs", "published weights", "decode cache", "expert ranks")}
    source = site / "mimo_language_parallel.py"
    source.write_text(source.read_text().replace("causal=True", "causal=False"))
    ended = mimo(*words, cwd=tmp_path, path=site)
    assert ended.code == 1
    assert "\nNO causality: A token changes nothing that comes before it, or before its item where" in ended.out
    assert (
        "\n   rows before token 1, after a change of it and all later ones, differ from before: row 0 by " in ended.out
    )


@pytest.mark.soak
def test_the_pages_language_model_trains_over_context_ranks_as_in_one_process(tmp_path: Path) -> None:
    """What `stage_context` says of any stage holds for a layer of one's own too."""
    site = build(tmp_path)
    cut = ("modules.language.tp=1", "modules.language.sequence_parallel=false", "modules.language.cp=2")
    succeed("train", "parallel.toml", STEPS, *cut, "run.directory=context", cwd=tmp_path, path=site)
    succeed("train", "parallel.toml", STEPS, *ALONE, "run.directory=alone", cwd=tmp_path, path=site)
    assert losses(tmp_path / "context") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


def test_each_part_that_the_page_names_is_public() -> None:
    """Every name of the table of parts is in the public list of `mimo.model.runtime`."""
    from mimo.model import runtime

    (table,) = re.findall(r"^## What the parts are\n(.*?)^A mixer of your own", TEXT, re.MULTILINE | re.DOTALL)
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 10
    assert names <= set(runtime.__all__)
