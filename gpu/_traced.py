"""What a run writes about its own steps: traces, on a GPU by its own events, and a profile of each rank."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from _big_models import make_job
from _case import Case, Found, alone, noting, run

from mimo.schedule import Plan
from mimo.trainer.runtime import train_rank

STEPS, TRACED, PROFILED = 4, (2, 4), 3
OUTLAST = 2.0
"""How many times as long as the bars of a step the kernels of another one may take: bars are of the device's time."""
SETTINGS = {"trace": True, "profile": str(PROFILED), "console": False}


def test(case: Case) -> Found:
    """Train a small model, and read what it has written."""
    folder = case.folder / "run"
    optimizer = {"plugin": "distributed"}
    small = attrs.evolve(case, tiny=True)
    job = make_job(small, pictures=True, optimizer=optimizer, steps=STEPS, logging=SETTINGS, directory=str(folder))
    with alone(case) as process:
        train_rank(job, process)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for step in TRACED:
        with noting(f"step {step}", wrong):
            bars = bars_of(folder, step)
            (seconds,) = (line["seconds"] for line in lines if line.get("step") == step and not line.get("evaluation"))
            figures[f"step {step}"] = {"bars": len(bars), "seconds of bars": length(bars), "seconds": seconds}
            wrong += [f"step {step}: {line}" for line in odd_bars(bars, kinds_of(plan), seconds)]
    with noting("profile", wrong):
        events = profile_of(folder)
        kernels = [event for event in events if event.get("cat") == "kernel"]
        figures["profile"] = {"events": len(events), "kernels": len(kernels), "seconds of kernels": length(kernels)}
        planned = [action.kind for action in plan.actions_of(0)]
        wrong += odd_profile(case, events, planned, length(bars_of(folder, TRACED[-1])))
    if not case.is_cuda:
        figures["left out"] = "kernels in the profile, and that no bar is shorter than its kernels"
    return Found(figures=figures, wrong=wrong)


def kinds_of(plan: Plan) -> list[str]:
    """Return what the one rank does in a step, in order, without messages."""
    return [action.kind for action in plan.actions_of(0) if action.kind not in ("send", "receive")]


def bars_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the measured bars of the trace of a step, as they stand in it."""
    events = json.loads((folder / "traces" / f"step_{step:08d}.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["pid"] == 0]


def profile_of(folder: Path) -> list[dict[str, Any]]:
    """Return all that has a length in the one profile."""
    (path,) = (folder / "profiles").iterdir()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def length(events: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of all together."""
    return sum(float(event["dur"]) for event in events) / 1e6


def odd_bars(bars: Sequence[dict[str, Any]], kinds: Sequence[str], seconds: float) -> list[str]:
    """Return what is wrong with the bars of a step that took so many seconds."""
    if [event["name"].split()[0] for event in bars] != [*kinds]:
        return [f"bars are {[event['name'] for event in bars]}, planned {kinds}"]
    wrong = [f"{event['name']} takes {event['dur']} us" for event in bars if not event["dur"] > 0]
    begun, ended = min(event["ts"] for event in bars), max(event["ts"] + event["dur"] for event in bars)
    if not (ended - begun) / 1e6 <= seconds:
        wrong.append(f"bars span {(ended - begun) / 1e6:.3g} s, the step took {seconds:.3g} s")
    return wrong


def odd_profile(case: Case, events: Sequence[dict[str, Any]], kinds: Sequence[str], bars: float) -> list[str]:
    """Return what is wrong with the profile of a step, ``bars`` being the seconds of those of another step."""
    named = [event for event in events if event.get("cat") == "user_annotation" and " stage " in event["name"]]
    words = [str(event["name"]).split()[0] for event in sorted(named, key=lambda event: float(event["ts"]))]
    found = ["reduce" if word == "sum" else word for word in words]
    wrong = [] if found == [*kinds] else [f"the profile has {found}, planned {kinds}"]
    if not case.is_cuda:
        return wrong
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return [*wrong, "the profile has no kernel"]
    if not length(kernels) <= OUTLAST * bars:
        wrong.append(f"kernels take {length(kernels):.3g} s, bars of a step {bars:.3g} s")
    return wrong


if __name__ == "__main__":
    sys.exit(run(test))
