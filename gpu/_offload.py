"""A decoder of a billion parameters whose optimizer's state the host holds, beside the same with all on the device."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from _big_models import make_job
from _case import Case, Found, noting, run
from _device_memory import DeviceMemory
from _trace import DeviceEvent, copied_seconds, hidden_share, trace
from _turns_taken import synchronise

from mimo.trainer import Trainer
from mimo.trainer.runtime import RankMemory, estimate_memory

WARM_UP, STEPS, TRACED, TINY = 2, 6, 3, (1, 1, 1)
HIDDEN, SAVED, LOSS = 0.8, 0.1, 0.01
"""Share of the time of copies in which something is computed, at least; by how much of the estimate may be off what is
saved of memory; by how much of itself a loss."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"distributed": {"plugin": "distributed"}, "cpu-offload": {"plugin": "cpu-offload", "fraction": 1.0}}
)


@attrs.frozen(kw_only=True)
class Cost:
    """Of one optimizer: losses, seconds a step, the most bytes of the device, the estimate, what the device did."""

    losses: Sequence[float]
    seconds: float
    bytes: int | None
    estimate: RankMemory
    events: Sequence[DeviceEvent]


def measure(case: Case, optimizer: Mapping[str, Any]) -> Cost:
    """Train some steps."""
    memory = DeviceMemory(case)
    warm_up, steps, traced = TINY if case.tiny else (WARM_UP, STEPS, TRACED)
    first = warm_up + steps + 1
    job = make_job(case, pictures=False, optimizer=optimizer, steps=first + traced)
    trainer = Trainer(job, device=case.device)
    infos = [trainer.train(step) for step in range(1, first)]
    synchronise(case)
    most = memory.peak()
    events = trace(case, lambda: [trainer.train(step) for step in range(first, first + traced)])
    trainer.close()
    return Cost(
        losses=[info.loss for info in infos],
        seconds=sum(info.seconds for info in infos[warm_up:]) / steps,
        bytes=most,
        estimate=estimate_memory(job)[0],
        events=events,
    )


def test(case: Case) -> Found:
    """Train with both."""
    if not case.tiny:
        torch.set_num_threads(os.cpu_count() or 1)  # the host steps with as many
    costs: dict[str, Cost] = {}
    wrong: list[str] = []
    for name, optimizer in OPTIMIZERS.items():
        with noting(name, wrong):
            costs[name] = measure(case, optimizer)
    if wrong:
        return Found(figures={name: figures_of(cost) for name, cost in costs.items()}, wrong=wrong)
    return compare(costs["distributed"], costs["cpu-offload"])


def figures_of(cost: Cost) -> dict[str, Any]:
    """Return what an optimizer came to beside which the other one failed."""
    return {
        "losses": list(cost.losses),
        "seconds a step": cost.seconds,
        "measured bytes of the device": cost.bytes,
        "estimated bytes of the device": cost.estimate.device,
        "copies beside computation": hidden_share(cost.events),
    }


def compare(plain: Cost, ours: Cost) -> Found:
    """Return figures of all state on the device and on the host, and the bounds that were missed."""
    off = max(abs(one / other - 1) for one, other in zip(ours.losses, plain.losses, strict=True))
    costs = {"distributed": plain, "cpu-offload": ours}
    estimated = plain.estimate.device - ours.estimate.device
    figures: dict[str, Any] = {
        "losses apart": off,
        "seconds a step": {name: cost.seconds for name, cost in costs.items()},
        "estimated bytes of the device": {name: cost.estimate.device for name, cost in costs.items()},
        "estimated bytes of the host": {name: cost.estimate.host for name, cost in costs.items()},
    }
    wrong = [] if off <= LOSS else [f"a loss is off by {off:.3g} of itself, allowed {LOSS:g}"]
    if ours.bytes is None or plain.bytes is None:
        figures["left out"] = "copies beside computation, and bytes of the device that were measured"
        return Found(figures=figures, wrong=wrong)
    hidden, saved = hidden_share(ours.events), plain.bytes - ours.bytes
    figures |= {
        "copies beside computation": hidden,
        "seconds of copies a step": copied_seconds(ours.events) / TRACED,
        "measured bytes of the device": {name: cost.bytes for name, cost in costs.items()},
        "bytes saved": {"measured": saved, "estimated": estimated},
    }
    if not hidden >= HIDDEN:
        wrong.append(f"{hidden:.3g} of the time of copies is beside computation, at least {HIDDEN:g}")
    if not abs(saved / estimated - 1) <= SAVED:
        wrong.append(f"{saved} bytes are saved, estimated {estimated}, allowed {SAVED:g} of that apart")
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
