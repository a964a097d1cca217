"""Tokens a second of a model of a billion parameters in bf16: ours, `transformers` and a plain loop, in turns.

Each is made anew in every turn, so that it has the device for itself. All train on the same samples: ours packed, the
others padded. Rows are those of samples, so that padding earns nothing.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
from _big_models import size_of
from _case import Case, Found, noting, run
from _device_memory import DeviceMemory
from _trace import DeviceEvent, idle_share, launches, trace
from _turns_taken import synchronise
from _ways import OURS, TRANSFORMERS, Ours, Step, Way, job_of, ways

from mimo.trainer.runtime import estimate_memory

ROUNDS: Mapping[str, int] = MappingProxyType({"text": 3, "pictures": 2})
"""Turns of each way by model; what is compiled has one, as that takes longer than all else."""
WARM_UP, WARM_UP_COMPILED, STEPS, TRACED, TINY_STEPS = 2, 4, 6, 2, 2
IDLE, ESTIMATE, LOSS = 0.15, 0.1, 0.3
"""Share of the time in which the device may compute nothing; by how much of the estimate its memory may be off; by how
much a loss differs from that of equal chances."""

LEFT_OUT = "kernels, time without any, memory of the device, share of its peak; no bound of a rate is judged"


@attrs.frozen(kw_only=True)
class Turn:
    """What one way came to in one turn.

    Args:
        steps: those that were timed.
        seconds: of all of them.
        bytes: most that the device held; None where nobody counts.
        events: of `TRACED` steps more.
        operations: that the model takes for the steps that were timed; None where the way doesn't say.
        peak: operations a second of the device; None where nobody knows.
    """

    steps: Sequence[Step]
    seconds: float
    bytes: int | None
    events: Sequence[DeviceEvent]
    operations: float | None = None
    peak: float | None = None

    @property
    def rate(self) -> float:
        """Rows of the decoder a second."""
        return sum(step.rows for step in self.steps) / self.seconds


def take(case: Case, way: Way, memory: DeviceMemory, *, compiled: bool) -> Turn:
    """Train some steps, then some more under the profiler."""
    warm_up = 1 if case.tiny else WARM_UP_COMPILED if compiled else WARM_UP
    count, traced = (TINY_STEPS, 1) if case.tiny else (STEPS, TRACED)
    timed = range(warm_up + 1, warm_up + count + 1)
    for number in range(1, warm_up + 1):
        way.step(number)
    synchronise(case)
    begun = time.perf_counter()
    steps = [way.step(number) for number in timed]
    synchronise(case)
    seconds = time.perf_counter() - begun
    most = memory.peak()
    events = trace(case, lambda: [way.step(number) for number in range(timed.stop, timed.stop + traced)])
    found = Turn(steps=steps, seconds=seconds, bytes=most, events=events)
    if isinstance(way, Ours):
        found = attrs.evolve(found, operations=sum(way.operations[number] for number in timed), peak=way.peak)
    return found


def take_all(case: Case, wrong: list[str]) -> Mapping[str, list[Turn]]:
    """Return the turns of each way, in which it did not fail."""
    model, compiled = case.options["model"], case.options["compiled"]
    makes = ways(case, pictures=model == "pictures", compiled=compiled)
    turns: dict[str, list[Turn]] = {name: [] for name in makes}
    for _ in range(1 if case.tiny or compiled else ROUNDS[model]):
        for name, make in makes.items():
            memory = DeviceMemory(case)
            with noting(name, wrong):
                way = make()
                try:
                    turns[name].append(take(case, way, memory, compiled=compiled))
                finally:
                    way.close()
                    del way
    return turns


def test(case: Case) -> Found:
    """Compare them."""
    pictures, compiled = case.options["model"] == "pictures", case.options["compiled"]
    wrong: list[str] = []
    turns = take_all(case, wrong)
    figures: dict[str, Any] = {} if case.is_cuda else {"left out": LEFT_OUT}
    if OURS not in turns:
        figures[OURS] = "not run: run.compile is no setting here"
    for name, each in turns.items():
        if each:
            figures[name] = figures_of(each, next(iter(turns.get(OURS, [])), None))
    figures["rows of timed steps"] = rows = {
        name: [step.rows for step in each[0].steps] for name, each in turns.items() if each
    }
    if len(set(map(tuple, rows.values()))) > 1:
        wrong.append(f"ways have read other samples, rows of their steps are {rows}")
    wrong += _odd_losses(turns, math.log(size_of(case).language["vocabulary"]))
    ours = turns.get(OURS)
    if ours:
        estimate = estimate_memory(job_of(case, pictures=pictures, compiled=compiled))[0].device
        figures["estimated bytes of the device"] = estimate
        if case.is_cuda:
            wrong += bounds_missed(ours, turns[TRANSFORMERS], estimate, compiled=compiled)
    return Found(figures=figures, wrong=wrong)


def figures_of(turns: Sequence[Turn], reference: Turn | None) -> dict[str, Any]:
    """Return what turns of a way came to; ``reference`` knows the arithmetic of the steps, the same for all ways."""
    last = turns[-1]
    found: dict[str, Any] = {
        "rows a second": statistics.median(turn.rate for turn in turns),
        "seconds a step": statistics.median(turn.seconds / len(turn.steps) for turn in turns),
        "losses": [step.loss for step in last.steps],
    }
    if reference is not None and reference.operations is not None and reference.peak is not None:
        seconds = statistics.median(turn.seconds for turn in turns)
        found["share of the device's peak (MFU)"] = reference.operations / seconds / reference.peak
    if last.bytes is not None:
        found |= {"bytes of the device": last.bytes}
    if last.events:
        found |= {"idle share": idle_share(last.events), "kernels a step": launches(last.events) / TRACED}
    return found


def _odd_losses(turns: Mapping[str, Sequence[Turn]], uniform: float) -> list[str]:
    """Return each loss that is far from that of equal chances: of ids that are drawn, no model learns more."""
    return [
        f"{name}: a loss is {step.loss:.3g}, that of equal chances {uniform:.3g}"
        for name, each in turns.items()
        for turn in each
        for step in turn.steps
        if not abs(step.loss / uniform - 1) <= LOSS
    ]


def bounds_missed(ours: Sequence[Turn], theirs: Sequence[Turn], estimate: int, *, compiled: bool) -> list[str]:
    """Return the bounds that were missed; ``estimate`` is of bytes. What is compiled may hold less: it saves less."""
    wrong, idle = [], idle_share(ours[-1].events)
    if not idle < IDLE:
        wrong.append(f"no kernel runs in {idle:.3g} of the time of ours, allowed {IDLE:g}")
    if len(ours) == len(theirs):
        ratio = statistics.median(one.rate / other.rate for one, other in zip(ours, theirs, strict=True))
        if not ratio >= 1:
            wrong.append(f"ours has {ratio:.3g} times the rows a second of transformers, at least 1")
    most = ours[-1].bytes
    if most is not None and not (-1 if compiled else -ESTIMATE) <= most / estimate - 1 <= ESTIMATE:
        wrong.append(f"ours holds {most} bytes at most, estimated {estimate}, allowed {ESTIMATE:g} of that apart")
    return wrong


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "model": {"choices": ("text", "pictures"), "required": True},
        "compiled": {"action": "store_true"},
    }
    sys.exit(run(test, options=own))
