"""Whole runs from Python: in fresh processes, whatever the calling program is and has done; nothing is left behind."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import mimo.trainer
import mimo.trainer.runtime
from mimo.hooks import ConfigError
from mimo.testing import start
from mimo.trainer import read_settings, resolve

SETTINGS = """
[run]
name = "text"
steps = 3
global_batch = 4
directory = "run"
[data]
plugin = "jsonl"
path = "train.jsonl"
evaluation_path = "train.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-1"
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""
PYTHON = (sys.executable, "-c")
"""A program without a main file, as a notebook is one; nor has it a guard of ``__name__``."""

IPYTHON = ("/bin/sh", "-c", f'exec {sys.executable} -m IPython --simple-prompt --no-banner --no-confirm-exit < "$0"')
"""A program whose lines IPython reads as if somebody typed them."""
CELLS = """\
from mimo.trainer import read_settings, resolve, train
first = train(resolve(read_settings("my.toml", ["run.directory=first"])))
print("result", first.directory, first.step)

import threading

from IPython.utils.capture import capture_output

def train_second():
    global second
    second = train(resolve(read_settings("my.toml", ["run.directory=second"])))

thread = threading.Thread(target=train_second)

with capture_output() as cell:
    thread.start()
    thread.join()

seen = "done in" in cell.stdout
print(f"result {second.directory} {second.step}; captured {seen}; {type(get_ipython()).__name__}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a small run can be trained."""
    (tmp_path / "my.toml").write_text(SETTINGS, encoding="utf-8")
    lines = [json.dumps({"text": f"to be or not to be {number}"}) for number in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def run(folder: Path, program: str) -> str:
    """Return what a program prints that runs to its end and leaves no process behind."""
    with start(program, program=PYTHON, cwd=folder) as started:
        return started.wait().printed


@pytest.mark.soak  # docs/python.md is followed every time
def test_api_train_evaluate_generate(folder: Path) -> None:
    """A program trains on two ranks, evaluates, generates, and is refused."""
    printed = run(
        folder,
        """
from mimo.hooks import ConfigError
from mimo.trainer import evaluate, generate, open_checkpoint, read_settings, resolve, train
job = resolve(read_settings("my.toml", overrides=("run.steps=2",)))
result = train(job)
print("result", result.directory, result.step, result.loss > 0)
info = evaluate("run")
print("evaluated", info.step, info.samples, info.loss > 0)
print("generated", type(generate(open_checkpoint("run"), "to be", max_tokens=2)).__name__)
try:
    train(job)
except ConfigError as error:
    print("refused", error.where)
""",
    )
    lines = printed.splitlines()
    assert lines[0].startswith("text: 2 steps with 2 processes"), printed
    assert {"result run 2 True", "evaluated 2 8 True", "generated str"} <= set(lines), printed
    assert "refused run.directory" in lines, printed


@pytest.mark.soak  # docs/python.md is followed in IPython every time
def test_api_train_in_ipython(folder: Path) -> None:
    """A run is trained from a cell and from a cell's thread, whose output appears where the cell prints."""
    (folder / "cells.ipy").write_text(CELLS, encoding="utf-8")
    environ = {"IPYTHONDIR": str(folder / "ipython")}
    with start("cells.ipy", program=IPYTHON, cwd=folder, environ=environ) as started:
        printed = started.wait().printed
    assert "result first 3" in printed, printed
    assert "done in" in printed.partition("result first 3")[0], printed
    assert "result second 3; captured True; TerminalInteractiveShell" in printed, printed


def test_api_train_raises_what_a_rank_says(folder: Path) -> None:
    """A rank that fails ends the run, not the program, which gets the reason, all of it in the report.

    The program has used tensors on many threads, and begins another run, which is refused.
    """
    with (folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write("\nno JSON\n")
    with start(
        """
import torch
from mimo.hooks import ConfigError
from mimo.trainer import RunFailedError, read_settings, resolve, train
torch.set_num_threads(4)
torch.ones(300, 300).matmul(torch.ones(300, 300)).requires_grad_().sum().backward()
job = resolve(read_settings("my.toml", ["run.global_batch=8", "run.evaluation_interval=0"]))
try:
    train(job)
except RunFailedError as error:
    print(error.code, error.report in str(error), "train.jsonl:9" in error.report)
try:
    train(job)
except ConfigError as error:
    print("refused", error.where)
""",
        program=PYTHON,
        cwd=folder,
    ) as started:
        ended = started.wait()
    assert ended.out.splitlines()[-2:] == ["3 True True", "refused run.directory"], ended
    assert "train.jsonl:9" in ended.err


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL])
def test_api_train_leaves_nobody_behind(folder: Path, number: signal.Signals) -> None:
    """An interrupt of the program alone is raised where it trains, and ends all ranks; they end with it if it dies."""
    with start(
        """
from mimo.trainer import read_settings, resolve, train
try:
    train(resolve(read_settings("my.toml", ["run.steps=1000000", "logging.interval=1"])))
except KeyboardInterrupt:
    print("interrupted")
""",
        program=PYTHON,
        cwd=folder,
    ) as started:
        started.wait_for("step  ")
        os.kill(started.pid, number)
        if number == signal.SIGINT:
            assert started.wait().out.splitlines()[-1] == "interrupted"
        else:
            until = time.monotonic() + 60
            while started.living() and time.monotonic() < until:
                time.sleep(0.1)
            assert not started.living()


def test_api_takes_a_mapping(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a file, with the same overrides and the same refusals."""
    monkeypatch.chdir(folder)
    table = {
        "run": {"name": "text", "steps": 3, "global_batch": 4, "directory": "run"},
        "data": {"plugin": "jsonl", "path": "train.jsonl", "evaluation_path": "train.jsonl"},
        "modules": {
            "language": {
                "plugin": "decoder",
                "ranks": "0-1",
                "config": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 16},
            }
        },
    }
    assert read_settings(table, ["run.steps=7"]) == read_settings("my.toml", ["run.steps=7"])
    assert resolve(read_settings(table)).world == 2
    with pytest.raises(ConfigError, match=r"run\.stepz"):
        read_settings(table, ["run.stepz=7"])


def test_api_imports_its_names_when_they_are_used() -> None:
    """The package itself imports no torch; settings and jobs need none; a name that isn't there is none."""
    program = """
import sys, mimo.trainer, mimo.trainer.runtime
assert not {"torch", "attrs", "numpy"} & set(sys.modules), "mimo.trainer"
from mimo.trainer import Job, RunFailedError, TrainResult, evaluate, read_settings, resolve, train
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603 -- our own text
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mimo.trainer.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [mimo.trainer, mimo.trainer.runtime])
def test_api_gives_type_checkers_the_names_that_it_gives(module: ModuleType) -> None:
    """What a public list imports for type checkers is, name by name, what it returns."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted(homes) == sorted(module.__all__) == dir(module)
    for name, home in homes.items():
        assert home is not None
        assert getattr(module, name) is getattr(import_module(home), name)
