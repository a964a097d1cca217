"""Time of a training step whose gradients are reduced, and parameters gathered, beside computation or before and after.

Two data lanes of a decoder under the plugin `distributed`, for each way to spread it (``shard``): neither of
``overlap_grad_reduce`` and ``overlap_param_gather``, each alone, and both. One microbatch a step, so that all of a
step's gradients are reduced in its one backward. The lanes are two processes on gloo, one thread each, which also send
and add up: over *loopback* what is hidden is waiting only, as the cores have no time to spare. Over a *link* of fewer
gigabits a second (`_link`) there is. A step is all of it: data, forward, backward, agreement, update. Seconds are the
slower rank's. All take turns in one run, and end with gradients and parameters that are equal to the bit.
``nox -s bench -- sharding [--rounds N] [--gbit G]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from _forked import in_ranks
from _found import Found, report
from _link import limit_loopback
from _text import WORDS, find
from torch import Tensor
from torch.distributed.tensor import DTensor

from mimo.schedule.runtime import Record
from mimo.trainer import Job, Trainer, read_settings, resolve

MODES = ("optimizer", "gradients", "full")
WAYS = {
    "neither": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "reduction": {"overlap_grad_reduce": True, "overlap_param_gather": False},
    "gathering": {"overlap_grad_reduce": False, "overlap_param_gather": True},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
WORLD = 2
WARM_UP = 2
STEPS = 2
"""Steps of each turn."""
TOKENS = 128
"""Of a sample; a lane has one in a step."""
MODEL = {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1408}

Case: TypeAlias = tuple[str, str]
"""Mode and way."""


@attrs.frozen(kw_only=True)
class Times:
    """What cases took.

    Args:
        seconds: a step of each turn, by case.
        share: of a step that is nothing but reduction, where it comes last (`optimizer`, without overlap), if measured.
    """

    seconds: Mapping[Case, list[float]]
    share: float | None


def job(mode: str, way: str) -> Job:
    """Resolve a case."""
    settings: dict[str, Any] = {
        "run": {"name": "sharding", "steps": 1000, "global_batch": WORLD, "micro_batch": 1},
        "data": {"plugin": "text", "words": TOKENS - 1},
        "tokenizer": {"plugin": "word", "words": WORDS},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-1", "config": MODEL}},
        "optimizer": {"plugin": "distributed", "shard": mode, "lr": 1e-3, "clip": 1.0, **WAYS[way]},
    }
    return resolve(read_settings(settings), find=find)


class Trained:
    """A case as it is being trained on this rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self._trainer = Trainer(job(*case), rank=rank, device=torch.device("cpu"))
        self._done = 0
        self.shares: list[float] = []

    def run(self, steps: int) -> None:
        """Take steps, and note which share of each was nothing but reduction."""
        for _ in range(steps):
            self._done += 1
            record = Record()
            began = time.perf_counter()
            self._trainer.update(self._done, self._trainer.accumulate(self._done, record))
            took = time.perf_counter() - began
            reduced = [one.ended - one.began for one in record.moments if one.action.kind == "reduce"]
            self.shares.append(sum(reduced) / took)

    def outcome(self) -> dict[str, Tensor]:
        """Take a step; return this rank's pieces of its gradients, and of the parameters after it."""
        self._done += 1
        stats = self._trainer.accumulate(self._done)
        found = {}
        for module in self._trainer.optimizer.modules.values():
            for name, parameter in module.part.parameters.items():
                assert parameter.grad is not None
                found[f"gradient of {name}"] = _piece(parameter.grad).clone()
        self._trainer.update(self._done, stats)
        for weights in self._trainer.optimizer.weights().values():
            found |= {name: _piece(weight.detach()).clone() for name, weight in weights.items()}
        return found


def _piece(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def measure(modes: Sequence[str], rank: int, rounds: int) -> Times:
    """Return the times of all cases, the same on both ranks."""
    trained = {(mode, way): Trained((mode, way), rank) for mode in modes for way in WAYS}
    seconds: dict[Case, list[float]] = {case: [] for case in trained}
    for one in trained.values():
        one.run(WARM_UP)
    for _ in range(rounds):
        for case, one in trained.items():
            dist.barrier()
            began = time.perf_counter()
            one.run(STEPS)
            took = torch.tensor((time.perf_counter() - began) / STEPS, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[case].append(float(took))
    check_equal({case: one.outcome() for case, one in trained.items()}, rank)
    last = trained.get(("optimizer", "neither"))
    return Times(seconds=seconds, share=None if last is None else statistics.median(last.shares))


def check_equal(outcomes: Mapping[Case, Mapping[str, Tensor]], rank: int) -> None:
    """Fail where a way of a mode ends with other gradients or parameters, to the bit, than the one without overlap.

    Raises:
        AssertionError: by name of the first.
    """
    for (mode, way), outcome in outcomes.items():
        expected = outcomes[mode, "neither"]
        assert outcome.keys() == expected.keys()
        for name, value in outcome.items():
            assert torch.equal(value, expected[name]), f"rank {rank}, shard = {mode}, {way}: {name} differs"


def compare(times: Times, link: str, *, aims: bool) -> Found:
    """Return seconds of each way over those without overlap, and print seconds."""
    if times.share is not None:
        print(f"{link}: without overlap reduction takes {times.share:.0%} of a step")
    ratios, wanted = {}, {}
    for (mode, way), found in times.seconds.items():
        print(f"{link}, {mode}, {way}: {statistics.median(found) * 1e3:.0f} ms a step")
        if way != "neither":
            what = f"time of a step, {link}, {mode}, overlap of {way} / neither"
            base = times.seconds[mode, "neither"]
            ratios[what] = [one / other for one, other in zip(found, base, strict=True)]
            if aims:
                wanted[what] = ("<=", 1.0)
    return Found(ratios=ratios, aims=wanted)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    parser.add_argument("--gbit", type=float, default=4.0, help="gigabits a second of the slower link")
    parser.add_argument("--mode", choices=MODES, action="append", help="ways to spread; all if left out")
    options = parser.parse_args()
    ranks = partial(in_ranks, partial(measure, options.mode or MODES), world=WORLD, rounds=options.rounds)
    found = [compare(ranks(), "loopback", aims=False)]
    link = f"{options.gbit:g} Gbit/s"
    try:
        limit_loopback(options.gbit)
    except (OSError, subprocess.CalledProcessError) as error:
        found.append(Found(absent={f"time of a step, {link}": str(error)}))
    else:
        found.append(compare(ranks(), link, aims=True))
    report("sharding", found, rounds=options.rounds)


if __name__ == "__main__":
    main()
