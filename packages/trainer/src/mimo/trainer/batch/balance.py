"""How evenly the lanes of each module share a step, with samples and items placed by count and by cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from mimo.data import Loads, fed_lanes, lane_costs
from mimo.schedule import Costs, simulate
from mimo.trainer.batch.step_samples import StepSamples
from mimo.trainer.config.settings import LANGUAGE, Balance
from mimo.trainer.cost.sample_costs import SampleCosts
from mimo.trainer.cost.step_sizes import StepSizes
from mimo.trainer.job.job import Job

BALANCES: Sequence[Balance] = ("count", "cost")


@attrs.frozen(kw_only=True)
class StepBalance:
    """What the slowest lanes of a step have to do.

    Args:
        groups: of the lanes of each group of ranks that wait for each other within the step, by module: of each
            microbatch what the slowest lane has to do, over what a lane has in a microbatch on average; of microbatches
            that share a pass, equal shares of it.
    """

    groups: tuple[Mapping[str, tuple[float, ...]], ...]

    @property
    def microbatches(self) -> int:
        """How many microbatches the step has."""
        return len(self.groups[0][LANGUAGE])

    def loads(self, module: str) -> tuple[float, ...]:
        """Return of each microbatch what the slowest of all lanes of a module has to do."""
        return tuple(max(loads) for loads in zip(*(group[module] for group in self.groups), strict=True))

    def slowest(self, module: str) -> float:
        """Return the time of the slowest lanes of a module over that of lanes that all have the same to do.

        Lanes of a group wait for each other in each microbatch, groups at the end of the step.
        """
        return max(sum(group[module]) for group in self.groups) / self.microbatches


def step_balance(job: Job, step: int) -> Mapping[Balance, StepBalance]:
    """Return what lanes have to do in a step, by how it is placed; a module without anything to do counts as even.

    Raises:
        DataError: a sample of the step cannot be laid out.
    """
    assert job.train is not None, "this job was resolved without training data"
    numbers = StepSamples(job, job.sample_order()).numbers(step)
    return balance_of(job, StepSizes.of(job, job.train, numbers), SampleCosts(job))


def balance_of(job: Job, sizes: StepSizes, costs: SampleCosts) -> Mapping[Balance, StepBalance]:
    """Return the same of a step of these samples.

    Args:
        job: the whole.
        sizes: of a step's samples, in order.
        costs: of this job.
    """
    found: dict[Balance, StepBalance] = {}
    for balance in BALANCES:
        placed = costs.place(sizes, balanced=balance == "cost")
        language, encoders = costs.loads(sizes, microbatches=len(placed))
        shares, fed = {}, {}
        for module in job.modules:
            number = -1 if module is job.language else job.beside.index(module)
            own = language if number < 0 else encoders[number]
            shares[module.name] = _shares(own, lane_costs(language, encoders, placed, number))
            if number >= 0:
                fed[module.name] = fed_lanes(language, encoders, placed, number)
        found[balance] = StepBalance(
            groups=tuple(
                {
                    name: tuple(max((loads[lane] for lane in lanes[name]), default=0.0) for loads in shares[name])
                    for name in shares
                }
                for lanes in _waiting_lanes(job, fed)
            )
        )
    return found


def _shares(own: Loads, lanes: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return of each microbatch what each lane has to do over what one has on average, from sums of each pass."""
    microbatches = sum(map(len, own.passes))
    mean = int(own.costs.sum()) / (own.lanes * microbatches)
    found = [(1.0,) * own.lanes] * microbatches
    if mean:
        for served, sums in zip(own.passes, lanes, strict=True):
            for index in served:
                found[index] = tuple(one / len(served) / mean for one in sums)
    return found


def _waiting_lanes(job: Job, fed: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[Mapping[str, Sequence[int]]]:
    """Yield for each group of ranks that wait for each other between reductions its lanes of each module.

    Ranks do that which share a collective inside of computations, those of a lane's stages, and those of a lane of
    another module and of the language lanes that it feeds, or that feed it.

    Args:
        job: whose ranks.
        fed: by module, between which of its lanes and which language lane rows travel.
    """
    groups, ranks = _Groups(job.world), dict[str, list[list[int]]]()
    for module in job.modules:
        grid, size = module.grid, job.model_graph.by_name[module.name].meeting_size
        lanes = ranks[module.name] = [[] for _ in range(grid.dp)]
        for rank in grid.ranks:
            lanes[grid.coordinates(rank).dp].append(rank)
        for stage in map(grid.stage_ranks, range(grid.pp)):
            lanes = [*lanes, *(list(stage[start : start + size]) for start in range(0, len(stage), size))]
        for lane in lanes:
            groups.join(lane)
    language = ranks[job.language.name]
    for name, pairs in fed.items():
        for source, target in pairs:
            groups.join([*ranks[name][source], *language[target]])
    firsts = sorted({groups.first(rank) for rank in range(job.world)})
    found: dict[int, dict[str, list[int]]] = {first: {name: [] for name in ranks} for first in firsts}
    for name, lanes in ranks.items():
        for number, own in enumerate(lanes):
            found[groups.first(own[0])][name].append(number)
    yield from found.values()


class _Groups:
    """Disjoint sets of ranks.

    Args:
        world: ranks, each of which begins alone.
    """

    def __init__(self, world: int) -> None:
        self._nearer = list(range(world))

    def first(self, rank: int) -> int:
        """Return the rank that stands for a rank's group."""
        while self._nearer[rank] != rank:
            self._nearer[rank] = rank = self._nearer[self._nearer[rank]]
        return rank

    def join(self, ranks: Sequence[int]) -> None:
        """Make one group of those of these ranks."""
        for rank in ranks:
            self._nearer[self.first(rank)] = self.first(ranks[0])


def step_seconds(job: Job, costs: Costs, balance: StepBalance) -> float:
    """Return the simulated seconds of a step until the last of its groups of ranks is done.

    Args:
        job: whose step.
        costs: of its stages, where all lanes have the same to do.
        balance: what they have to do.
    """
    plan = job.plan_of(balance.microbatches)
    return max(
        simulate(plan, job.graph, attrs.evolve(costs, loads=_of_stages(job, loads))).seconds for loads in balance.groups
    )


def _of_stages(job: Job, loads: Mapping[str, Sequence[float]]) -> Mapping[str, tuple[float, ...]]:
    """Return loads as `Costs` has them: by what a plan calls the module, relative to the fewest microbatches."""
    own = {stage.module: loads[job.built(stage).module] for stage in job.graph.stages}
    return {name: tuple(load * job.microbatches / len(each) for load in each) for name, each in own.items()}
