"""Steps of ragged samples, run: by count, by cost, and as it is usual, with costs gathered and pixels exchanged.

*compute*: two processes train a small model on all of its samples. *sleep*: eight, more than there are cores, whose
computations sleep as long as they take by formula, stretched to tens of milliseconds, for as much as their lanes have
to do; plans, data, routes and messages are real. Their lanes meet at the end of the step. *gather*: the same where
parameters are sharded over all ranks, so that a computation first waits for all of them; those that compute do that
too. A step runs from when all ranks begin until the last is done; agreement and update are left out.

The usual way, all ranks read samples in order. For each microbatch they gather what everyone's items cost, place them,
and send each item's pixels from who has read it to who encodes it. The step is then the same one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import numpy as np
import torch
import torch.distributed as dist
from _forked import in_ranks
from _found import Found
from _ragged import draw_ragged, make_job, steps_of
from simulator import Sleeper, sleeping, stretched
from typing_extensions import override

from mimo.schedule import Costs
from mimo.schedule.runtime import Record
from mimo.trainer import Job, Trainer
from mimo.trainer.runtime import (
    Microbatch,
    SampleCosts,
    StepData,
    StepSizes,
    balance_of,
    job_costs,
    step_seconds,
)

Ran = Literal["compute", "sleep", "gather"]
WORLD: Mapping[Ran, int] = {"compute": 2, "sleep": 8, "gather": 8}
_WHAT: Mapping[Ran, str] = {
    "compute": "2 processes that compute",
    "sleep": "8 processes that sleep",
    "gather": "8 processes that sleep, parameters gathered",
}
GAIN, SHORTER = 0.9, 1.5
"""Aims: measured over computed gain; step by count over by cost of eight that wait for each other."""
STEPS = 2
"""Different steps that are run."""
SECONDS = 0.05
"""What the language model's forward of a microbatch is stretched to where ranks sleep."""
_SIDE = 56
_WORDS: Mapping[Ran, int] = {"compute": 160, "sleep": 512, "gather": 512}
_PATCH: Mapping[Ran, int] = {"compute": 7, "sleep": 4, "gather": 4}
"""Of 56 pixels a side: 64 rows of a picture, 196 where they cost nothing."""
_LAYERS: Mapping[Ran, tuple[int, int]] = {"compute": (4, 2), "sleep": (1, 1), "gather": (1, 1)}
"""Of the encoder and of the language model; what sleeps needs few, whose times are stretched."""
_VIT = {"width": 128, "heads": 4, "intermediate": 512}
_DECODER = {"hidden": 128, "heads": 4, "intermediate": 384}


def _job(ran: Ran, lanes: int) -> Job:
    encoder, language = _LAYERS[ran]
    sizes = draw_ragged(2000, _SIDE, _WORDS[ran], config={**_VIT, "patch": _PATCH[ran], "layers": encoder})
    return make_job(sizes, lanes=lanes, decoder={**_DECODER, "layers": language}, beside=False, gathered=ran != "sleep")


class _LaneSleeper(Sleeper):
    """Sleeps for what its own lane has to do."""

    loads: Mapping[str, Sequence[float]]
    """By module, of each microbatch what this rank's lane has to do over what lanes have on average."""
    gathers: bool
    """Whether a computation waits for all ranks, as one does that gathers its parameters from them."""

    @override
    def meet(self) -> None:
        if self.gathers:
            dist.barrier()

    @override
    def load(self, microbatches: tuple[int, ...]) -> float:
        return sum(self.loads[self.module.name][index] for index in microbatches)


@attrs.frozen
class _Took:
    """Seconds of one round of a step.

    Args:
        count: placed by count.
        cost: by cost.
        usual: of gathering and exchanging before it.
        computed: what by count takes over by cost, by simulation.
    """

    count: float
    cost: float
    usual: float
    computed: float


def measure(ran: Ran, whole: Costs, rank: int, rounds: int) -> list[_Took]:
    """Return what each of several steps took, in turn, in each round.

    Args:
        ran: how.
        whole: what a step costs whose lanes all have the same to do.
        rank: this process.
        rounds: of each step.
    """
    job = _job(ran, WORLD[ran])
    assert job.train is not None
    if ran != "compute":
        _LaneSleeper.gathers = ran == "gather"
        trainer = Trainer(job, rank=rank, device=torch.device("cpu"), parts=sleeping(whole, _LaneSleeper))
    else:
        trainer = Trainer(job, rank=rank, device=torch.device("cpu"))
    costs = SampleCosts(job)
    found = []
    for number, samples in zip(range(STEPS), steps_of(job), strict=False):
        sizes = StepSizes.of(job, job.train, samples)
        seconds = {how: step_seconds(job, whole, balance) for how, balance in balance_of(job, sizes, costs).items()}
        cut = partial(StepData.of_step, job, job.train, partial(tuple, samples))
        for turn in range(0 if number == 0 else 1, rounds + 1):  # the very first one isn't counted
            took = {}
            for how, by in (("count", None), ("cost", costs)):
                data = cut(costs=by)
                _LaneSleeper.loads = _loads(job, costs, data, rank)
                took[how] = _step(trainer, job, data, first=not (number or turn or by))
            usual = _exchange(job, cut(costs=None), cut(costs=costs), rank)
            if turn:
                found.append(_Took(took["count"], took["cost"], usual, seconds["count"] / seconds["cost"]))
    return found


def _step(trainer: Trainer, job: Job, data: StepData, *, first: bool) -> float:
    record = Record()
    dist.barrier()
    trainer.measure(job.plan, data, record, first=first)
    ends = torch.tensor([-record.began, record.ended], dtype=torch.float64)  # one clock for all processes of a machine
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return float(ends.sum())


def _loads(job: Job, costs: SampleCosts, data: StepData, rank: int) -> dict[str, list[float]]:
    """Return by module what this rank's lane has to do in each microbatch over what lanes have on average."""
    found: dict[str, list[float]] = {}
    for module in job.modules:
        lanes = [
            [_lane_cost(job, costs, one, module.name, lane) for lane in range(module.grid.dp)]
            for one in data.microbatches
        ]
        mean = sum(map(sum, lanes)) / (len(lanes) * module.grid.dp)
        found[module.name] = [each[module.grid.coordinates(rank).dp] / mean for each in lanes]
    return found


def _lane_cost(job: Job, costs: SampleCosts, one: Microbatch, module: str, lane: int) -> float:
    if module == job.language.name:
        sizes = [(len(layout.tokens), int(layout.targets.sum())) for layout in one.lane_layouts(job.language, lane)]
        return float(costs.samples(*np.array(sizes, dtype=np.int64).reshape(-1, 2).T).sum())
    encoder = job.module(module)
    return sum(costs.item(encoder, item.info.size) for item in one.items(encoder, lane))


def _exchange(job: Job, read: StepData, placed: StepData, rank: int) -> float:
    """Return for how many seconds costs are gathered and pixels sent from where they are read to where they belong."""
    (encoder,) = job.encoders
    lanes = range(encoder.grid.dp)

    def holders(data: StepData) -> list[dict[tuple[int, int], int]]:
        return [
            {(item.info.sample, item.info.index): lane for lane in lanes for item in one.items(encoder, lane)}
            for one in data.microbatches
        ]

    here = {key for one in holders(read) for key, lane in one.items() if lane == rank}
    size = 3 * _SIDE * _SIDE
    pixels = {key: torch.zeros(size) for key in here}
    of_reader = {key: lane for one in holders(read) for key, lane in one.items()}
    dist.barrier()
    begun = time.perf_counter()
    for one in holders(placed):
        mine = torch.tensor([float(size)] * sum(of_reader[key] == rank for key in one))
        counts = [torch.zeros(1, dtype=torch.long) for _ in lanes]
        dist.all_gather(counts, torch.tensor([len(mine)]))
        most = max(int(count) for count in counts)
        gathered = [torch.zeros(most) for _ in lanes]
        dist.all_gather(gathered, torch.nn.functional.pad(mine, (0, most - len(mine))))
        going = [[key for key, lane in one.items() if of_reader[key] == rank and lane == target] for target in lanes]
        coming = [sum(of_reader[key] == source and lane == rank for key, lane in one.items()) for source in lanes]
        sent = torch.cat([pixels[key] for keys in going for key in keys] or [torch.zeros(0)])
        got = torch.empty(sum(coming) * size)
        dist.all_to_all_single(got, sent, [count * size for count in coming], [len(keys) * size for keys in going])
    took = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def run_steps(rounds: int) -> list[Found]:
    """Return ratios of all rounds, for two processes that compute and eight that sleep."""
    parts = []
    for ran in WORLD:
        whole = job_costs(_job(ran, WORLD[ran]))
        if ran != "compute":
            whole = stretched(whole, SECONDS)
        found = in_ranks(partial(measure, ran, whole), world=WORLD[ran], rounds=rounds)
        what = _WHAT[ran]
        gain, over = f"{what}: measured over computed gain", f"{what}: step by count over by cost"
        parts.append(
            Found(
                ratios={
                    over: [one.count / one.cost for one in found],
                    gain: [one.count / one.cost / one.computed for one in found],
                    f"{what}: the usual way over ours": [(one.cost + one.usual) / one.cost for one in found],
                },
                aims={gain: (">=", GAIN), **({over: (">=", SHORTER)} if ran == "gather" else {})},
            )
        )
    return parts
