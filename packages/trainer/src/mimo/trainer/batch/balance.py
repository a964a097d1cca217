"""How evenly the lanes of each module share a step, with samples and items placed by count and by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.data import lane_costs
from mimo.schedule import Costs
from mimo.trainer.batch.step_samples import StepSamples
from mimo.trainer.config.settings import Balance
from mimo.trainer.cost.sample_costs import SampleCosts
from mimo.trainer.cost.step_sizes import StepSizes
from mimo.trainer.job.job import Job

BALANCES: Sequence[Balance] = ("count", "cost")


@attrs.frozen(kw_only=True)
class StepBalance:
    """What the slowest lanes of a step have to do.

    Args:
        loads: by module, of each microbatch what the slowest lane has to do, over what a lane has in a microbatch on
            average; of microbatches that share a pass, equal shares of it.
    """

    loads: Mapping[str, tuple[float, ...]]

    def slowest(self, module: str) -> float:
        """Return the time of the slowest lanes of a module over that of lanes that all have the same to do."""
        own = self.loads[module]
        return sum(own) / len(own)


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
        loads = {}
        for module in job.modules:
            number = -1 if module is job.language else job.encoders.index(module)
            own = language if number < 0 else encoders[number]
            mean = int(own.costs.sum()) / (own.lanes * len(placed))
            lanes = lane_costs(language, encoders, placed, number)
            shares = {
                index: max(sums) / len(served) / mean if mean else 1.0
                for served, sums in zip(own.passes, lanes, strict=True)
                for index in served
            }
            loads[module.name] = tuple(shares[index] for index in range(len(placed)))
        found[balance] = StepBalance(loads=loads)
    return found


def with_loads(job: Job, costs: Costs, balance: StepBalance) -> Costs:
    """Return the costs of a step whose microbatches cost what their slowest lanes have to do."""
    loads = {stage.module: _of_costs(job, balance.loads[job.built(stage).module]) for stage in job.graph.stages}
    return attrs.evolve(costs, loads=loads)


def _of_costs(job: Job, loads: tuple[float, ...]) -> tuple[float, ...]:
    """Return loads relative to a microbatch as costs are of: where steps have several numbers, of the fewest."""
    if len(loads) == job.microbatches:
        return loads
    return tuple(load * job.microbatches / len(loads) for load in loads)
