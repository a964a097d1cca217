"""`mimo train examples/digits.toml` on the device, with NCCL of one rank on a GPU, beside the same on the CPU.

Both run the command at once, each in one process. What they do differs by rounding alone, which training enlarges.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from _case import Case, Found, run

FIRST, FIRST_STEPS, EARLY_STEPS = 1e-5, 1e-3, 10
RIGHT, APART = 0.9, 0.05
TIMEOUT = 90


@attrs.frozen(kw_only=True)
class Run:
    """What a run has written: the loss of each step, and the last evaluation."""

    losses: Sequence[float]
    seconds: float
    evaluation: Mapping[str, Any]


def test(case: Case) -> Found:
    """Train both and compare."""
    directories = {name: case.folder / name for name in ("device", "host")}
    devices = {"device": case.device.type, "host": "cpu"}
    begun = {name: _begin(case, devices[name], directory) for name, directory in directories.items()}
    failed = []
    for name, process in begun.items():
        if process.wait():
            print(f"What {name} said:", _log(directories[name]).read_text(errors="replace"), sep="\n", flush=True)
            failed.append(f"{name}: mimo train ended with code {process.returncode}")
    if failed:
        return Found(figures={}, wrong=failed)
    device, host = (_read(directory) for directory in directories.values())
    return _compare(case, device, host)


def _begin(case: Case, device: str, directory: Path) -> subprocess.Popen[bytes]:
    steps = {"run.steps": 6, "run.global_batch": 16, "data.held_out": 0.01} if case.tiny else {"run.steps": 200}
    settings = {
        **steps,
        "run.device": device,
        "run.directory": directory,
        "run.timeout": TIMEOUT,
        "run.evaluation_interval": 0,
        "data.plugin": "carried-digits",
        "data.file": os.environ["MIMO_DAY_DIGITS"],
        "modules.vision.ranks": 0,
        "modules.language.ranks": 0,
        "modules.language.tp": 1,
        "optimizer.lr_warmup_steps": 2 if case.tiny else 10,
        "checkpoint.interval": 0,
        "logging.interval": 50,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "mimo.trainer", "train", "examples/digits.toml", *words]
    with _log(directory).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603  # our own program


def _log(directory: Path) -> Path:
    """Return where a run's words go, as `day.py` looks for them: beside its directory."""
    return directory.with_suffix(".log")


def _read(directory: Path) -> Run:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if not line.get("evaluation") and "loss" in line]
    (evaluation,) = (line for line in lines if line.get("evaluation"))
    return Run(
        losses=[math.nan if step["loss"] is None else step["loss"] for step in steps],
        seconds=sum(step["seconds"] for step in steps[1:]) / max(len(steps) - 1, 1),
        evaluation=evaluation,
    )


def _compare(case: Case, device: Run, host: Run) -> Found:
    off = [abs(one / other - 1) for one, other in zip(device.losses, host.losses, strict=True)]
    right = [each.evaluation["exact_match"] for each in (device, host)]
    early = off[1:EARLY_STEPS]
    wrong = []
    if not off[0] <= FIRST:
        wrong.append(f"the first loss is off by {off[0]:.3g} of itself, allowed {FIRST:g}")
    if not max(early) <= FIRST_STEPS or any(map(math.isnan, early)):
        wrong.append(f"one of the first losses is off by {max(early):.3g} of itself, allowed {FIRST_STEPS:g}")
    if not case.tiny and not (min(right) >= RIGHT and abs(right[0] - right[1]) <= APART):
        wrong.append(f"{right[0]:.3f} of the held-out images are right, on the CPU {right[1]:.3f}")
    figures = {
        "first loss apart": off[0],
        "first ten losses apart": max(early),
        "all losses apart": max(off),
        "held-out images right": dict(zip(("device", "CPU"), right, strict=True)),
        "held-out loss": {"device": device.evaluation["loss"], "CPU": host.evaluation["loss"]},
        "seconds a step": {"device": device.seconds, "CPU": host.seconds},
        "steps": len(off),
    }
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
