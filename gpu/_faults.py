"""A rank that is killed, sleeps or is stopped in the middle of a run on the device: who is named, and how all end.

Four ranks share the device (`_staged`): two encode, two read together. A killed run then resumes.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from _case import Case, Found, plain_arithmetic, run
from _staged import RENDEZVOUS
from jobs import make_job
from tables import Table, table
from test_oracle import on

from mimo.launch import ProcessInfo
from mimo.launch.runtime import Terms, launch, start_method
from mimo.trainer import Trainer
from mimo.trainer.runtime import Decide, StepOutcome, note_failure, train_rank

STEPS, STRUCK, SAVED = 5, 3, 2
RANK, WORLD = 1, 4
TIMEOUT, PATIENT, END_SECONDS = 8.0, 120.0, 60.0
TIMEOUT_CUDA = 20.0
"""On GPUs the first kernels of each kind take seconds, in which a rank only seems to hang."""
LOSS = 1e-5
LOG = "ranks.log"
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "is-killed": rf"rank {RANK} was ended by signal 9 \(SIGKILL\)",
        "sleeps": rf"rank {RANK} did not go on for \d+(\.\d)? s in step {STRUCK}, at __(mp_)?main__, line \d+",
        "is-stopped": rf"rank {RANK} no longer answers: it was killed or stopped",
    }
)
"""What the last line says."""


def strike(how: str) -> None:
    """Kill, stop or delay this process."""
    if how == "sleeps":
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGSTOP if how == "is-stopped" else signal.SIGKILL)


def train_struck(settings: Table, how: str, process: ProcessInfo) -> None:
    """Train as a rank of `mimo train`; one rank is struck before a step, none where ``how`` is empty."""
    plain_arithmetic()
    take = Trainer.take

    def struck(trainer: Trainer, number: int, decide: Decide) -> StepOutcome:
        if how and (process.rank, number) == (RANK, STRUCK):
            strike(how)
        return take(trainer, number, decide)

    with mock.patch.object(Trainer, "take", struck):
        train_rank(make_job(settings), process)


def settings_of(directory: Path, *, timeout: float = PATIENT, **checkpoint: Any) -> Table:
    """Return settings of a run of four ranks."""
    found = table({"vision": on(0, 1), "language": on(2, 3, tp=2)}, microbatches=2)
    found["run"] |= {"steps": STEPS, "directory": str(directory), "evaluation_interval": 0, "timeout": timeout}
    found["checkpoint"] = {"interval": SAVED, "asynchronous": False, **checkpoint}
    return found


def begin(case: Case, settings: Table, how: str) -> tuple[int, str, float]:
    """Run it; return the exit code, what was written to stderr, and the seconds that it took."""
    device, begun = case.kind, time.monotonic()
    directory = Path(settings["run"]["directory"])
    directory.mkdir(exist_ok=True)
    terms = Terms(timeout=settings["run"]["timeout"], stops=True, on_failure=partial(note_failure, directory))
    with _stderr_in(case.folder / LOG):
        code = launch(
            partial(train_struck, settings, how),
            world=WORLD,
            device=device,
            method=start_method(device),
            terms=terms,
            rendezvous=RENDEZVOUS,
        )
    return code, (case.folder / LOG).read_text(errors="replace"), time.monotonic() - begun


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Have this process and those that it starts write their errors into a file."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        sys.stderr.write(path.read_text(errors="replace"))


def test(case: Case) -> Found:
    """Strike a rank, and resume the run where it can be resumed."""
    how, struck = case.options["how"], case.folder / "struck"
    patience = PATIENT if how == "is-killed" else TIMEOUT_CUDA if case.is_cuda else TIMEOUT
    code, printed, seconds = begin(case, settings_of(struck, timeout=patience), how)
    lines = printed.strip().splitlines() or [""]
    left = _children()
    checks = {
        f"ended with code {code}, expected 3": code == 3,
        f"the last line is {lines[-1]!r}": bool(re.search(WORDS[how], lines[-1])),
        f"error.txt ends with something else than {lines[-1]!r}": _reason(struck) == lines[-1].removeprefix("mimo: "),
        f"it took {seconds:.0f} s, allowed {END_SECONDS:.0f}": seconds <= END_SECONDS,
        f"processes {left} are left": not left,
    }
    figures: dict[str, Any] = {"code": code, "last line": lines[-1], "seconds until all had ended": seconds}
    if how == "is-killed" and not case.tiny:
        whole, _, _ = begin(case, settings_of(case.folder / "whole"), "")
        again, _, _ = begin(case, settings_of(struck, load="latest"), "")
        losses = [_losses(case.folder / name) for name in ("whole", "struck")]
        off = abs(losses[1].get(STEPS, math.nan) / losses[0].get(STEPS, math.nan) - 1)
        checks[f"the run without a fault ended with code {whole}, the resumed one with {again}"] = whole == again == 0
        checks[f"the last loss after resuming is off by {off:.3g} of itself, allowed {LOSS:g}"] = off <= LOSS
        figures["last loss after resuming apart"] = off
    return Found(figures=figures, wrong=[line for line, holds in checks.items() if not holds])


def _reason(directory: Path) -> str:
    path = directory / "error.txt"
    return (path.read_text(encoding="utf-8").strip().splitlines() or [""])[-1] if path.exists() else ""


def _children() -> list[int]:
    """Return processes that this one has started and that are left, without Python's own helpers."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"resource_tracker" not in command:
            found.append(int(pid))
    return found


def _losses(directory: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if not line.get("evaluation") and "loss" in line}


if __name__ == "__main__":
    sys.exit(run(test, options={"how": {"choices": tuple(WORDS), "required": True}}))
