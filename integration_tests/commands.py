"""Commands as a user types them, in processes of their own; what they start must be gone when they end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from house import ROOT

from mimo.trainer._cli import run

SCRIPT = Path(sys.executable).with_name("mimo")
"""The ``mimo`` command of this environment."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
"""Words after ``python`` that are torchrun on this machine."""

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
"""Words after ``mimo`` that train the example in quick steps, of which each is told."""

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

SECONDS = 200
"""Longest that one command may take."""

_MARK = "MIMO_TEST_COMMAND"
_COLUMNS = "160"
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@attrs.frozen(kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refused(self, *texts: str) -> bool:
        """Tell whether it was refused before launch: code 2, one line on stderr that begins so and holds the rest."""
        begins, *others = texts
        told = self.err.startswith(f"mimo: {begins}") and all(text in self.err for text in others)
        return self.code == 2 and not self.out and self.err.count("\n") == 1 and told

    @property
    def printed(self) -> str:
        """What it printed; it must have succeeded without a word on stderr."""
        assert (self.code, self.err) == (0, ""), self
        return self.out


@attrs.frozen(kw_only=True)
class Started:
    """A command that runs."""

    process: subprocess.Popen[str]
    mark: str

    def wait(self) -> Ended:
        """Return how it ended; nothing that it started may be left."""
        out, err = self.process.communicate(timeout=SECONDS)
        left = _living(self.mark)
        assert not left, f"{len(left)} processes were left behind by a command that ended with:\n{out}\n{err}"
        return Ended(code=self.process.returncode, out=out, err=err)

    def wait_for(self, text: str) -> None:
        """Return when the command has printed a line with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}: {self.wait()}")

    def workers(self) -> list[int]:
        """Return the processes that it started, in that order."""
        pid = self.process.pid
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@contextlib.contextmanager
def start(
    *words: str | Path, cwd: Path = ROOT, environ: Mapping[str, str] | None = None, path: Path | None = None
) -> Iterator[Started]:
    """Start a program as the head of a process group, as a shell does; end whatever is left of it at the end.

    Args:
        words: program and arguments.
        cwd: where it runs.
        environ: more environment variables.
        path: one more folder to import from.
    """
    mark = uuid.uuid4().hex
    ours = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    ours |= {"OMP_NUM_THREADS": "1", "COLUMNS": _COLUMNS, _MARK: mark, **(environ or {})}
    if path is not None:
        ours["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        list(map(str, words)),
        cwd=cwd,
        env=ours,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with process:
        try:
            yield Started(process=process, mark=mark)
        finally:
            for pid in _living(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def mimo(
    *words: str | Path, cwd: Path = ROOT, environ: Mapping[str, str] | None = None, path: Path | None = None
) -> Ended:
    """Run ``mimo`` with these words; see `start`."""
    with start(SCRIPT, *words, cwd=cwd, environ=environ, path=path) as started:
        return started.wait()


def here(*words: str | Path, cwd: Path = ROOT) -> Ended:
    """Run ``mimo`` with these words in this process, which spares a start: for what launches no others."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, COLUMNS=_COLUMNS),
    ):
        code = run(list(map(str, words)))
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


def succeed(*words: str | Path, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Run ``mimo``, which must succeed without a word on stderr, and return what it printed."""
    return mimo(*words, cwd=cwd, path=path).printed


def torchrun(
    processes: int, *words: str | Path, options: tuple[str, ...] = (), cwd: Path = ROOT, path: Path | None = None
) -> Ended:
    """Run ``mimo`` with these words in each of a number of processes that torchrun starts."""
    ours = (*TORCHRUN, f"--nproc-per-node={processes}", *options, "-m", "mimo.trainer")
    with start(sys.executable, *ours, *words, cwd=cwd, path=path) as started:
        return started.wait()


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the steps and the evaluations of a run directory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
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


def _living(mark: str) -> list[int]:
    """Return the processes that inherited a mark; those that have ended and wait to be reaped don't show theirs."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}\0".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found
