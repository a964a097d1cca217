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
from typing import Any, get_args

import attrs
from _big_models import DECODERS, size_of
from _case import Case, Found, noting, run
from _device_memory import DeviceMemory
from _trace import DeviceEvent, idle_share, launches, trace
from _turns_taken import synchronise
from _ways import OURS, OURS_COMPILED, TRANSFORMERS, Compiled, Ours, Step, Way, job_of, ways

from mimo.trainer.runtime import estimate_memory

ROUNDS: Mapping[str, int] = MappingProxyType({"text": 3, "pictures": 2})
"""Turns of each way by model; one where some are compiled, as that takes longer than all else."""
WARM_UP, WARM_UP_COMPILED, STEPS, TRACED, TINY_STEPS = 2, 4, 6, 2, 2
BEHIND: Mapping[str, str] = MappingProxyType({OURS: TRANSFORMERS, OURS_COMPILED: OURS})
"""Of each way of ours, which other has at most as many rows a second."""
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
        compiled: whether layers are.
        operations: that the model takes for the steps that were timed; None where the way doesn't say.
        peak: operations a second of the device; None where nobody knows.
    """

    steps: Sequence[Step]
    seconds: float
    bytes: int | None
    events: Sequence[DeviceEvent]
    compiled: bool
    operations: float | None = None
    peak: float | None = None

    @property
    def rate(self) -> float:
        """Rows of the decoder a second."""
        return sum(step.rows for step in self.steps) / self.seconds


def take(case: Case, way: Way, memory: DeviceMemory) -> Turn:
    """Train some steps, then some more under the profiler."""
    warm_up = 1 if case.tiny else WARM_UP_COMPILED if way.compiled else WARM_UP
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
    found = Turn(steps=steps, seconds=seconds, bytes=most, events=events, compiled=way.compiled)
    if isinstance(way, Ours):
        found = attrs.evolve(found, operations=sum(way.operations[number] for number in timed), peak=way.peak)
    return found


def take_all(case: Case, wrong: list[str]) -> Mapping[str, list[Turn]]:
    """Return the turns of each way, in which it did not fail."""
    model, compiled = case.options["model"], case.options["compiled"]
    makes = ways(case, pictures=model == "pictures", compiled=compiled, decoder=case.options["decoder"])
    turns: dict[str, list[Turn]] = {name: [] for name in makes}
    for _ in range(1 if case.tiny or compiled != "none" else ROUNDS[model]):
        for name, make in makes.items():
            memory = DeviceMemory(case)
            with noting(name, wrong):
                way = make()
                try:
                    turns[name].append(take(case, way, memory))
                finally:
                    way.close()
                    del way
    return turns


def test(case: Case) -> Found:
    """Compare them."""
    wrong: list[str] = []
    turns = take_all(case, wrong)
    figures: dict[str, Any] = {} if case.is_cuda else {"left out": LEFT_OUT}
    if OURS not in turns:
        figures[OURS] = "not run: run.compile is no setting here"
    reference = next((turn for name in BEHIND for turn in turns.get(name, [])), None)
    for name, each in turns.items():
        if each:
            figures[name] = figures_of(each, reference)
    figures["rows of timed steps"] = rows = {
        name: [step.rows for step in each[0].steps] for name, each in turns.items() if each
    }
    if len(set(map(tuple, rows.values()))) > 1:
        wrong.append(f"ways have read other samples, rows of their steps are {rows}")
    wrong += _odd_losses(turns, math.log(size_of(case).language["vocabulary"]))
    if reference is not None:
        job = job_of(case, pictures=case.options["model"] == "pictures", decoder=case.options["decoder"])
        figures["estimated bytes of the device"] = estimate = estimate_memory(job)[0].device
        if case.is_cuda:
            wrong += bounds_missed(turns, estimate)
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


def bounds_missed(turns: Mapping[str, Sequence[Turn]], estimate: int) -> list[str]:
    """Return the bounds that ways of ours missed; ``estimate`` is of bytes."""
    return [
        line
        for name, other in BEHIND.items()
        if turns.get(name)
        for line in _missed(name, turns[name], other, turns.get(other, []), estimate)
    ]


def _missed(name: str, ours: Sequence[Turn], other: str, theirs: Sequence[Turn], estimate: int) -> list[str]:
    """Return the bounds that one way missed. What is compiled may hold less: it saves less."""
    wrong, last = [], ours[-1]
    idle = idle_share(last.events)
    if not idle < IDLE:
        wrong.append(f"no kernel runs in {idle:.3g} of the time of {name}, allowed {IDLE:g}")
    if len(ours) == len(theirs):
        ratio = statistics.median(one.rate / each.rate for one, each in zip(ours, theirs, strict=True))
        if not ratio >= 1:
            wrong.append(f"{name} has {ratio:.3g} times the rows a second of {other}, at least 1")
    most = last.bytes
    if most is not None and not (-1 if last.compiled else -ESTIMATE) <= most / estimate - 1 <= ESTIMATE:
        wrong.append(f"{name} holds {most} bytes at most, estimated {estimate}, allowed {ESTIMATE:g} of that apart")
    return wrong


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "model": {"choices": ("text", "pictures"), "required": True},
        "decoder": {"choices": DECODERS, "default": "decoder"},
        "compiled": {"choices": get_args(Compiled), "default": "none"},
    }
    sys.exit(run(test, options=own))
