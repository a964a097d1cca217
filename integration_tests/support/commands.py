"""Commands as a user types them, their settings, and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from house import ROOT

from mimo.testing import COLUMNS, Ended, Started, free_port, processes
from mimo.trainer.commands.main import run

SCRIPT = Path(sys.executable).with_name("mimo")
"""The ``mimo`` command of this environment, to be executed where its start is what is tested."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
"""Torchrun on this machine."""

DIGITS = (
    "train",
    "examples/digits.toml",
    "run.global_batch=8",
    "run.micro_batch=4",
    "run.evaluation_interval=0",
    "data.held_out=0.01",
    "optimizer.lr_schedule=constant",
    "optimizer.lr_min=0",
    "logging.interval=1",
)
"""Words after ``mimo`` that train the example in quick steps, each of which is printed."""

TEXT = """
[run]
name = "text"
steps = 4
global_batch = 4
directory = "run"
[data]
plugin = "jsonl"
path = "train.jsonl"
[checkpoint]
interval = 1
asynchronous = false
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""
"""Settings of a small model that reads text alone, on one process; all its steps are saved."""

_PRELOAD = (
    *processes.PRELOAD,
    "preloaded",
    "mimo_logger_pictures",
    "matplotlib.figure",
    "sklearn.datasets",
    "commands",
)


def be_mimo(*words: str) -> NoReturn:
    """Be ``mimo`` with these words."""
    sys.exit(run(words))


def start(
    *words: str | Path,
    program: Sequence[str | Path] = (),
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
    call: Callable[..., object] = be_mimo,
) -> AbstractContextManager[Started]:
    """Start ``mimo`` with these words; see `mimo.testing.start`."""
    return processes.start(*words, program=program, cwd=cwd, environ=environ, path=path, call=call, preload=_PRELOAD)


def mimo(
    *words: str | Path,
    program: Sequence[str | Path] = (),
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Ended:
    """Run ``mimo`` with these words; see `start`."""
    with start(*words, program=program, cwd=cwd, environ=environ, path=path) as started:
        return started.wait()


def here(*words: str | Path, cwd: Path = ROOT) -> Ended:
    """Run ``mimo`` with these words in this process, which spares a start: for what launches no others.

    Ranks would be forked from this one, and stand still where torch has computed in it before: it launches none.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, COLUMNS=COLUMNS),
        mock.patch.object(ForkProcess, "start", side_effect=AssertionError("to launch ranks, run `mimo`, not `here`")),
    ):
        code = run(list(map(str, words)))
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


def succeed(*words: str | Path, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Run ``mimo``, which must succeed without a word on stderr, and return what it printed."""
    return mimo(*words, cwd=cwd, path=path).printed


def torchrun(processes: int, *words: str, restarts: int, cwd: Path, path: Path) -> Ended:
    """Run ``mimo`` with these words in each of a number of processes that torchrun's agent starts, and starts again.

    It forks them: those that its command executes take seconds each to import torch.
    """
    with start(*words, cwd=cwd, path=path, call=partial(_be_agent, processes, restarts)) as started:
        return started.wait()


def _be_agent(processes: int, restarts: int, *words: str) -> None:
    """Be ``torchrun --standalone``, and exit as it does."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _be_mimo_of_agent)(*words)


def _be_mimo_of_agent(*words: str) -> None:
    """Be ``mimo``, but return where it succeeds: the agent waits until all functions have returned."""
    if code := run(words):
        sys.exit(code)


def places(world: int, **more: str) -> list[dict[str, str]]:
    """Return the environment of each of some processes that something else starts, and more variables."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    return [{"RANK": str(rank), **master, **more} for rank in range(world)]


def write_lines(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write samples as a jsonl file."""
    path.write_text("".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples), encoding="utf-8")


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the steps and the evaluations of a run directory; lines about saves are left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    return [line for line in lines if "evaluation" not in line], [line for line in lines if "evaluation" in line]


def losses(run: Path) -> list[float]:
    """Return the loss of each step of a run directory."""
    return [step["loss"] for step in read_metrics(run)[0]]


def install(folder: Path, name: str, source: str, *entry_points: str) -> Path:
    """Make a distribution of one module in ``folder``, and return the folder to import from.

    Args:
        folder: where it lies.
        name: of the distribution and of its module.
        source: of the module.
        entry_points: groups that the module serves, each under the module's name.
    """
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {name}\n" for group in entry_points))
    return folder
