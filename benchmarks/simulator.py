"""The simulator beside reality: seconds of a step as simulated, over the median of steps that were run.

What things cost is measured first, as `mimo profile` does. *compute*: two processes train a small model. *sleep*: four
to eight processes, more than there are cores, whose computations and reductions sleep as long as they took in the
profile, stretched to tens of milliseconds; plans, data, boundaries, sends and receives are real.
A step runs from when all ranks begin until the last is done; agreement and update are left out, on either side.
``nox -s bench -- simulator [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import attrs
import torch
import torch.distributed as dist
from _forked import in_ranks
from _tiled import WORDS, find
from torch import Tensor
from typing_extensions import override

from mimo.launch import ProcessInfo
from mimo.model.runtime import DeferredWeightGrads, Part, WeightGradQueue
from mimo.optimizer import Phase
from mimo.optimizer.runtime import LocalStats
from mimo.schedule import Costs, PlanPhase, Seconds, StageCost, simulate
from mimo.schedule.runtime import LOSS, Record
from mimo.topology import StageId
from mimo.trainer import Job, Trainer, read_settings, resolve
from mimo.trainer.runtime import NumberedData, Program, RankParts, measure_job, samples

WARM_UP = 3
PROFILES = {"compute": 3, "sleep": 1}
"""How often a case is profiled and run in turn: the speed of computing changes from one minute to the next."""
MEAN_SECONDS = 0.03
"""What the profile's forwards of the language model's stages are stretched to on average where ranks sleep."""
IN_ITS_STEP, AHEAD = (
    f"6 ranks: frozen vision dp 2{how}, language pp 4, 1f1b" for how in ("", " a step ahead of its projector")
)
"""Cases that differ in nothing but ``prefetch``."""
WITHIN = 0.1

Ran: TypeAlias = Literal["compute", "sleep"]
Tables: TypeAlias = Mapping[str, Mapping[str, Any]]
VISION = {"plugin": "vit", "config": {"channels": 1, "patch": 4, "width": 192, "layers": 4, "intermediate": 512}}
LANGUAGE = {"plugin": "decoder", "config": {"hidden": 192, "layers": 8, "heads": 6, "intermediate": 512}}


@attrs.frozen(kw_only=True)
class Case:
    """A layout and a schedule.

    Args:
        ran: how.
        schedule: name and keys of its table.
        microbatches: of a step.
        modules: keys of each module's table beside its plugin.
        modalities: that the data has.
    """

    ran: Ran
    schedule: Mapping[str, Any]
    modules: Tables
    microbatches: int = 8
    modalities: tuple[str, ...] = ("image",)

    def job(self) -> Job:
        """Resolve it; each language lane has two samples of a microbatch."""
        lanes = self.modules["language"].get("dp", 1)
        tables = {name: {**(LANGUAGE if name == "language" else VISION), **keys} for name, keys in self.modules.items()}
        settings = {
            "run": {
                "name": "simulator",
                "steps": 1,
                "device": "cpu",
                "micro_batch": 2,
                "global_batch": 2 * lanes * self.microbatches,
            },
            "data": {"plugin": "tiled", "pixels": 32, "words": 60, "modalities": list(self.modalities)},
            "tokenizer": {"plugin": "word", "words": WORDS},
            "modules": tables,
            "schedule": dict(self.schedule),
        }
        return resolve(read_settings(settings), find=find)


def _schedule(plugin: str, **keys: Any) -> dict[str, Any]:
    return {"plugin": plugin, **keys}


_PIPELINE: Tables = {"vision": {"ranks": "0"}, "language": {"ranks": "0-1", "pp": 2}}
_CHUNKS: Tables = {"vision": {"ranks": "0"}, "language": {"ranks": "0-1", "pp": 2, "chunks": 2}}
_FOUR: Tables = {"vision": {"ranks": "0"}, "language": {"ranks": "0-3", "pp": 4}}
_FOUR_CHUNKS: Tables = {"vision": {"ranks": "0"}, "language": {"ranks": "0-3", "pp": 4, "chunks": 2}}
_EIGHT: Tables = {"vision": {"ranks": "0-3", "pp": 2}, "language": {"ranks": "4-7", "pp": 2}}
CASES: dict[str, Case] = {
    "disjoint, 1f1b": Case(
        ran="compute", schedule=_schedule("1f1b"), modules={"vision": {"ranks": "0"}, "language": {"ranks": "1"}}
    ),
    "colocated dp 2, 1f1b": Case(
        ran="compute", schedule=_schedule("1f1b"), modules={"vision": {"ranks": "0-1"}, "language": {"ranks": "0-1"}}
    ),
    "vision beside stage 0 of pp 2, gpipe": Case(ran="compute", schedule=_schedule("gpipe"), modules=_PIPELINE),
    "vision beside stage 0 of pp 2, 1f1b": Case(ran="compute", schedule=_schedule("1f1b"), modules=_PIPELINE),
    "vision beside stage 0 of pp 2, zero-bubble h1": Case(
        ran="compute", schedule=_schedule("zero-bubble", form="h1"), modules=_PIPELINE
    ),
    "pp 2 of 2 chunks, interleaved": Case(ran="compute", schedule=_schedule("interleaved"), modules=_CHUNKS),
    "pp 2 of 2 chunks, zero-bubble v": Case(
        ran="compute", schedule=_schedule("zero-bubble", form="v"), modules=_CHUNKS
    ),
    "4 ranks: pp 4, gpipe": Case(ran="sleep", schedule=_schedule("gpipe"), modules=_FOUR),
    "4 ranks: pp 4, 1f1b": Case(ran="sleep", schedule=_schedule("1f1b"), modules=_FOUR),
    "4 ranks: pp 4, zero-bubble h1": Case(ran="sleep", schedule=_schedule("zero-bubble", form="h1"), modules=_FOUR),
    "4 ranks: pp 4, zero-bubble h2": Case(ran="sleep", schedule=_schedule("zero-bubble", form="h2"), modules=_FOUR),
    "4 ranks: pp 4 of 2 chunks, interleaved": Case(
        ran="sleep", schedule=_schedule("interleaved"), modules=_FOUR_CHUNKS
    ),
    "4 ranks: pp 4 of 2 chunks, zero-bubble v": Case(
        ran="sleep", schedule=_schedule("zero-bubble", form="v"), modules=_FOUR_CHUNKS
    ),
    "4 ranks: vision dp 2, language tp 2, 1f1b": Case(
        ran="sleep",
        schedule=_schedule("1f1b"),
        modules={"vision": {"ranks": "0-1"}, "language": {"ranks": "2-3", "tp": 2}},
    ),
    "4 ranks: two encoders, language pp 2, 1f1b": Case(
        ran="sleep",
        schedule=_schedule("1f1b"),
        modules={
            "vision": {"ranks": "0"},
            "scan": {"ranks": "1", "modality": "scan"},
            "language": {"ranks": "2-3", "pp": 2},
        },
        modalities=("image", "scan"),
    ),
    "4 ranks: vision on all of them, language pp 4, ahead": Case(
        ran="sleep",
        schedule=_schedule("ahead"),
        modules={"vision": {"ranks": "0-3"}, "language": {"ranks": "0-3", "pp": 4}},
    ),
    "6 ranks: frozen vision dp 2, language pp 4, 1f1b": Case(
        ran="sleep",
        schedule=_schedule("1f1b"),
        modules={"vision": {"ranks": "0-1", "frozen": ["encoder"]}, "language": {"ranks": "2-5", "pp": 4}},
    ),
    "6 ranks: frozen vision dp 2 a step ahead of its projector, language pp 4, 1f1b": Case(
        ran="sleep",
        schedule=_schedule("1f1b"),
        modules={
            "vision": {"ranks": "0-1", "frozen": ["encoder"], "prefetch": True},
            "language": {"ranks": "2-5", "pp": 4},
        },
    ),
    "8 ranks: vision pp 2 dp 2, language pp 2 dp 2, 1f1b": Case(
        ran="sleep", schedule=_schedule("1f1b"), modules=_EIGHT
    ),
    "8 ranks: vision pp 2 dp 2, language pp 2 dp 2, zero-bubble h1": Case(
        ran="sleep", schedule=_schedule("zero-bubble", form="h1"), modules=_EIGHT
    ),
}


class _Sleep(torch.autograd.Function):
    """Rows out of nothing: both ways take their time."""

    @staticmethod
    def forward(ctx: Any, sleeper: Sleeper, microbatches: float, rows: int, *inputs: Tensor) -> Tensor:
        ctx.sleeper, ctx.microbatches, ctx.inputs = sleeper, microbatches, [value.shape for value in inputs]
        sleeper.meet()
        time.sleep(sleeper.cost.forward.of(microbatches))
        return inputs[0].new_zeros(rows, sleeper.width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cost, weight_grad_queue = ctx.sleeper.cost, ctx.sleeper.weight_grad_queue
        seconds = cost.weight_gradient.of(ctx.microbatches)
        ctx.sleeper.meet()
        time.sleep(cost.recompute.of(ctx.microbatches) + cost.input_gradient.of(ctx.microbatches))
        if weight_grad_queue.is_collecting:
            weight_grad_queue.defer(ctx.sleeper.anchor, partial(_slept, ctx.sleeper.anchor, seconds))
        else:
            time.sleep(seconds)
        return None, None, None, *(gradients[0].new_zeros(shape) for shape in ctx.inputs)


def _slept(anchor: Tensor, seconds: float, total: Tensor | None) -> Tensor:
    """Return the sum of gradients that take their time and are nothing."""
    time.sleep(seconds)
    return torch.zeros_like(anchor) if total is None else total


class Sleeper(Program):
    """A stage that computes nothing for as long as its computations take."""

    def __init__(self, parts: RankParts, stage: StageId, cost: StageCost) -> None:
        job = parts.job
        self.module = job.module(stage.module)
        self.part: Part = parts.model.parts[job.built(stage)]
        self.cost = cost
        self.weight_grad_queue = WeightGradQueue()
        self._outputs_of = job.graph.outputs(stage)
        self._rank = parts.rank
        self.anchor = torch.zeros(1, 1, requires_grad=job.graph.by_name[stage.module].trains[stage.stage])
        self.width = job.width(self._outputs_of[0]) if self._outputs_of else 1

    def begin(
        self,
        data: NumberedData,
        *,
        scores: bool,
        following: NumberedData | None = None,
        phase: PlanPhase = "both",  # noqa: ARG002 - it counts nothing
    ) -> None:
        """Take the samples of the step to come."""
        assert not scores
        self._data = data.data
        steps = (data, *(() if following is None else (following,)))
        self._microbatches = tuple(batch for step in steps for batch in step.data.microbatches)

    def share(self) -> LocalStats:
        """Return nothing."""
        return LocalStats()

    def load(self, microbatches: tuple[int, ...]) -> float:
        """Return how many microbatches a pass over some costs as much as."""
        return len(microbatches)

    def meet(self) -> None:
        """Wait for the ranks that compute with this one; here for none, as all of them sleep equally long."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sleep, and return as many rows as the routes send."""
        ends = [self.anchor, *inputs.values()]
        count = self.load(microbatches)
        if not self._outputs_of:
            return {LOSS: _Sleep.apply(self, count, 1, *ends).sum()}  # type: ignore[no-untyped-call]  # PyTorch's
        (edge,) = self._outputs_of
        rows = sum(self._microbatches[index].route(edge, self._rank).held for index in microbatches)
        return {edge.name: _Sleep.apply(self, count, rows, *ends)}  # type: ignore[no-untyped-call]  # PyTorch's

    def defer_weight_grads(self) -> contextlib.AbstractContextManager[DeferredWeightGrads]:
        """Put the weights' share off."""
        return self.weight_grad_queue.collect()

    @override
    def on_compute(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    @override
    def on_grad_accumulation(self, *_args: object, **_last: object) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """Sleep."""
        time.sleep(self.cost.reduce)

    def reduce_tied(self) -> None:
        """Sleep."""
        time.sleep(self.cost.reduce_tied)


def sleeping(costs: Costs, sleeper: type[Sleeper] = Sleeper) -> type[RankParts]:
    """Return what is like any other rank's parts, but that its stages sleep as long as they cost."""

    class Sleeping(RankParts):
        @override
        def program(self, stage: StageId) -> Program:
            return sleeper(self, stage, costs.stages[stage])

    return Sleeping


def stretched(costs: Costs, mean: float = MEAN_SECONDS) -> Costs:
    """Return costs whose language model's forwards take ``mean`` seconds on average, all else in proportion."""
    language = [cost for stage, cost in costs.stages.items() if stage.module == "language"]
    factor = mean / statistics.mean(cost.forward.of(1) for cost in language)

    def of(seconds: Seconds) -> Seconds:
        return Seconds(seconds.fixed * factor, seconds.each * factor)

    return attrs.evolve(
        costs,
        stages={
            stage: attrs.evolve(
                cost,
                forward=of(cost.forward),
                input_gradient=of(cost.input_gradient),
                weight_gradient=of(cost.weight_gradient),
                recompute=of(cost.recompute),
                reduce=cost.reduce * factor,
            )
            for stage, cost in costs.stages.items()
        },
    )


def prepare(case: Case, rank: int) -> tuple[Trainer, Costs]:
    """Return what runs a case, and what it costs."""
    job = case.job()
    process = ProcessInfo(rank=rank, world=job.world, local_rank=rank, device="cpu")
    measured = measure_job(job, process).costs(job.settings.run.micro_batch).trained(job.graph)
    if case.ran == "compute":
        return Trainer(job, rank=rank, device=torch.device("cpu")), measured
    costs = stretched(measured)
    return Trainer(job, rank=rank, device=torch.device("cpu"), parts=sleeping(costs)), costs


def measure(case: Case, rank: int, rounds: int) -> list[tuple[float, list[float]]]:
    """Return, several times, simulated seconds of a step, and those of each step that was run thereafter."""
    return [measure_once(case, rank, rounds) for _ in range(PROFILES[case.ran])]


def measure_once(case: Case, rank: int, rounds: int) -> tuple[float, list[float]]:
    """Measure what things cost, and then steps."""
    trainer, costs = prepare(case, rank)
    job = trainer.job
    data = samples(job, job.settings.run.micro_batch)
    found = []
    for step in range(WARM_UP + rounds):
        record = Record()
        dist.barrier()
        trainer.measure(job.plan, data, record, first=not step)
        # One clock for all processes of a machine. A rank without a module began when it ended.
        ends = torch.tensor([-record.began, record.ended], dtype=torch.float64)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if step >= WARM_UP:
            found.append(float(ends.sum()))
    return simulate(job.plan, job.graph, costs).seconds, found


def cases(name: str, ran: str) -> Iterator[tuple[str, Case]]:
    """Yield the cases whose name has ``name`` in it, and that are run so."""
    for found, case in CASES.items():
        if name in found and ran in ("", case.ran):
            yield found, case


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="steps of a case after each of its profiles; the median of all counts"
    )
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--ran", default="", choices=("", "compute", "sleep"), help="only those that are run so")
    arguments = parser.parse_args()
    ratios, spread = {}, {}
    steps_of: dict[str, float] = {}
    print(f"{'layout and schedule':<66} {'ran':<8} {'measured':>10} {'simulated':>10} {'ratio':>6}")
    for name, case in cases(arguments.case, arguments.ran):
        world = case.job().world
        pairs = in_ranks(partial(measure, case), world=world, rounds=arguments.rounds)
        simulated = statistics.median(seconds for seconds, _ in pairs)
        measured = statistics.median(seconds for _, steps in pairs for seconds in steps)
        steps_of[name] = measured
        what = f"simulated / measured, {case.ran}, {name}"
        ratios[what] = simulated / measured
        each = [seconds / statistics.median(steps) for seconds, steps in pairs]
        spread[what] = [min(each), max(each)]
        print(
            f"{name:<66} {case.ran:<8} {measured * 1e3:>7.1f} ms {simulated * 1e3:>7.1f} ms {ratios[what]:>6.3f}",
            flush=True,
        )
    off = {what: abs(ratio - 1) for what, ratio in ratios.items()}
    print(f"{sum(one <= WITHIN for one in off.values())} of {len(off)} within {WITHIN:.0%}")
    ratios["furthest off"] = max(off.values())
    aims = {"furthest off": ["<=", WITHIN]}
    if {IN_ITS_STEP, AHEAD} <= steps_of.keys():
        ratios["tower in its step / a step ahead of its projector, measured"] = steps_of[IN_ITS_STEP] / steps_of[AHEAD]
    print(
        json.dumps({"bench": "simulator", "ratios": ratios, "aims": aims, "runs": arguments.rounds, "spread": spread})
    )


if __name__ == "__main__":
    main()
