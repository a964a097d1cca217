"""The tutorial of a model that answers questions about pictures, typed as it stands there."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from commands import here, mimo, read_metrics
from house import ROOT

from mimo.testing import Ended, start

PAGE = (ROOT / "docs" / "tutorial-vlm.md").read_text(encoding="utf-8")
MAKE, ANSWER = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(SETTINGS,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(SHOWN,) = re.findall(r"^```\n(sample.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
HELD_OUT = range(48, 60)


def type_all(folder: Path, *, steps: int | None) -> dict[str, Ended]:
    """Type every command of the page in a new folder, and return how each ended; training by so many steps."""
    for name, text in (("make.py", MAKE), ("answer.py", ANSWER), ("vlm.toml", SETTINGS)):
        (folder / name).write_text(text, encoding="utf-8")
    return {line: type_one(folder, line, steps) for line in COMMANDS}


def type_one(folder: Path, line: str, steps: int | None) -> Ended:
    """Type one command; those that compute with tensors in another process."""
    program, *words = shlex.split(line)
    if program == "python" and words == ["make.py"]:
        with contextlib.chdir(folder):
            runpy.run_path("make.py")
        return Ended(code=0, out="", err="")
    if program == "python":
        with start(*words, program=(sys.executable,), cwd=folder) as started:
            return started.wait()
    assert program == "mimo"
    fewer = () if steps is None or words[0] != "train" else (f"run.steps={steps}", "run.evaluation_interval=0")
    return (mimo if words[0] in {"train", "generate"} else here)(*words, *fewer, cwd=folder)


def check(folder: Path, ended: dict[str, Ended]) -> None:
    """Every command worked, showed what the page shows, and transformers answers as we do."""
    assert {line: one for line, one in ended.items() if one.code} == {}
    assert [line.rstrip() for line in ended["mimo data show vlm.toml"].out.splitlines()] == SHOWN.splitlines()
    printed = ended["mimo checkpoint import-hf language=llama vision=siglip --out weights"].printed
    for table in ("language", "vision"):
        (theirs,) = re.findall(rf"^\[modules\.{table}\.config\]\n(?:\w.*\n)+", printed, re.MULTILINE)
        assert theirs in SETTINGS
    answers = dict(line.split(" ", 1) for line in ended["python answer.py"].out.splitlines())
    assert answers.keys() == set(map(str, HELD_OUT))
    first = next(line for line in COMMANDS if "generate" in line)
    assert ended[first].out.strip().startswith(answers["48"].strip())  # which ends after twelve tokens


def test_the_tutorial_of_pictures_works_as_it_stands(tmp_path: Path) -> None:
    """But for the number of steps."""
    check(tmp_path, type_all(tmp_path, steps=12))


@pytest.mark.soak
def test_the_tutorial_of_pictures_learns_what_it_says(tmp_path: Path) -> None:
    """Most of the pictures that were held out are described right."""
    ended = type_all(tmp_path, steps=None)
    check(tmp_path, ended)
    _, evaluations = read_metrics(tmp_path / "runs" / "vlm")
    assert evaluations[-1]["exact_match"] > 0.5
    answers = [line.split(" ", 1)[1] for line in ended["python answer.py"].out.splitlines()]
    lines = (tmp_path / "data" / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum(answer.strip() in line for answer, line in zip(answers, lines, strict=True)) > len(HELD_OUT) // 2
