"""What samples and items cost the modules, by formula or profile, as plain numbers: what a placement follows from.

Everything follows from the job and the sizes of the step, by additions, products and quotients alone, so that all
ranks find the same numbers to the bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mimo.data import (
    EncoderLoads,
    Loads,
    PlacedMicrobatch,
    fill,
    in_whole_numbers,
    place_by_cost,
    place_by_count,
    place_filled,
)
from mimo.model import EncoderSpec
from mimo.schedule import Costs
from mimo.trainer.cost.operations import module_operations
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import formula_costs, job_costs
from mimo.trainer.cost.step_sizes import StepSizes, Whole, numbered
from mimo.trainer.job.job import Job, JobModule

_EXACT = 8
"""Lengths of so many binary digits are computed; between longer ones that differ in these digits lies a line."""
_MAX_SIZES = 1 << 16
"""Sizes of items whose costs are remembered."""


class SampleCosts:
    """Operations of one sample or item on one rank of a lane, all pipeline ranks together, as forward and backward.

    Args:
        job: whose modules.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._scales = _scales(job)
        self._homes = {module.name: _homes(job, module) for module in job.encoders}
        self._lengths: dict[int, float] = {}
        self._items: dict[tuple[str, tuple[int, ...]], float] = {}
        self._label = self._operations(job.language, SampleStats(lengths=(1,), labels=1, sizes={}))
        self._label -= self._operations(job.language, SampleStats(lengths=(1,), labels=0, sizes={}))

    @property
    def scales_text(self) -> str:
        """What of the costs follows neither from the job's settings nor from sizes, but from a profile."""
        return repr(sorted(self._scales.items()))

    def samples(self, lengths: Whole, labels: Whole) -> NDArray[np.float64]:
        """Return what samples cost the language model.

        Args:
            lengths: ``[N]`` tokens of each.
            labels: ``[N]`` how many of these are learned from.
        """
        digits = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
        steps = 1 << np.maximum(digits - _EXACT, 0)
        low = lengths // steps * steps
        costs = self._at(low)
        costs += (self._at(low + steps) - costs) * (lengths - low) / steps
        costs += labels * self._label
        return costs

    def item(self, module: JobModule, size: tuple[int, ...]) -> float:
        """Return what an item costs its encoder."""
        key = (module.name, size)
        if key not in self._items:
            if len(self._items) >= _MAX_SIZES:
                self._items.clear()
            stats = SampleStats(lengths=(1,), labels=0, sizes={module.modality: (size,)})
            self._items[key] = self._operations(module, stats)
        return self._items[key]

    def loads(self, sizes: StepSizes, *, microbatches: int) -> tuple[Loads, tuple[EncoderLoads, ...]]:
        """Return what a step of samples of these sizes costs the language model and each encoder of the job."""
        job = self._job
        items = [sizes.items[module.modality] for module in job.encoders]
        language, *encoders = in_whole_numbers(
            [
                self.samples(sizes.lengths, sizes.labels),
                *(
                    np.array([self.item(module, size) for size in own.sizes])
                    for module, own in zip(job.encoders, items, strict=True)
                ),
            ]
        )
        return (
            Loads(
                costs=language,
                rows=sizes.lengths,
                lanes=job.language.grid.dp,
                stages=job.language.grid.pp,
                passes=tuple((index,) for index in range(microbatches)),
            ),
            tuple(
                EncoderLoads(
                    costs=costs[own.of_item],
                    rows=own.rows,
                    lanes=module.grid.dp,
                    stages=module.grid.pp,
                    passes=tuple(job.model_graph.by_name[module.name].passes(microbatches)),
                    samples=own.samples,
                    homes=self._homes[module.name],
                )
                for module, own, costs in zip(job.encoders, items, encoders, strict=True)
            ),
        )

    def place(self, sizes: StepSizes, *, balanced: bool = True) -> tuple[PlacedMicrobatch, ...]:
        """Place a step's samples by cost, or by count where ``balanced`` is false; by tokens, in order."""
        run = self._job.settings.run
        if run.batch_tokens:
            bins = fill(sizes.lengths.tolist(), most_rows=run.micro_tokens, in_order=not balanced)
            language, encoders = self.loads(sizes, microbatches=self._microbatches(bins))
            return place_filled(language, encoders, bins, most_rows=run.micro_tokens, balanced=balanced)
        language, encoders = self.loads(sizes, microbatches=self._job.microbatches)
        place = place_by_cost if balanced else place_by_count
        return place(language, encoders, microbatches=self._job.microbatches, micro_batch=run.micro_batch)

    def _microbatches(self, bins: NDArray[np.int64]) -> int:
        """Return how many microbatches a step of bins has: as the first plan with enough for them."""
        needed = -(-(int(bins.max(initial=-1)) + 1) // self._job.language.grid.dp)
        return next(plan.microbatches for plan in self._job.plans if plan.microbatches >= needed)

    def _at(self, lengths: Whole) -> NDArray[np.float64]:
        """Return what samples of these lengths cost without labels, each length computed once."""
        which = numbered(lengths)
        different = np.zeros(int(which.max(initial=-1)) + 1, dtype=np.int64)
        different[which] = lengths
        return np.array([self._length(length) for length in different.tolist()])[which]

    def _length(self, length: int) -> float:
        if length not in self._lengths:
            stats = SampleStats(lengths=(length,), labels=0, sizes={})
            self._lengths[length] = self._operations(self._job.language, stats) if length else 0.0
        return self._lengths[length]

    def _operations(self, module: JobModule, stats: SampleStats) -> float:
        """Return a rank's share of the operations of a module.

        Without a formula, a row of an encoder is as costly as a token of the language model, whatever that is.
        """
        grid = module.grid
        if module.spec.flops is not None:
            found = module_operations(self._job, module.name, stats)
            total = found.forward + found.backward + found.repeated
        elif isinstance(module.spec, EncoderSpec):
            rows = sum(module.spec.rows(module.config, size) for size in stats.sizes[module.modality])
            return rows * self._length(1)
        else:
            total = float(sum(stats.lengths))
        return total * self._scales[module.name] / (grid.cp * grid.tp)


def sample_costs(job: Job) -> SampleCosts | None:
    """Return by what a job's training samples are placed; None where that is by count, or nothing is to be placed."""
    return SampleCosts(job) if job.balance == "cost" and _can_differ(job) else None


def _can_differ(job: Job) -> bool:
    """Tell whether there is more than one place for a sample or an item."""
    return job.plans[-1].microbatches > 1 or any(module.grid.dp > 1 for module in job.modules)


def _homes(job: Job, module: JobModule) -> tuple[tuple[int, ...], ...]:
    """Return for each language lane the lanes of an encoder whose last stage shares a rank with its first stage."""
    cut = job.model_graph.by_name[module.name]
    ranks = set(module.grid.stage_ranks(cut.pipeline_rank(cut.stages - 1)))
    language = job.language.grid
    found: list[set[int]] = [set() for _ in range(language.dp)]
    for rank in language.stage_ranks(0):
        if rank in ranks:
            found[language.coordinates(rank).dp].add(module.grid.coordinates(rank).dp)
    return tuple(tuple(sorted(lanes)) for lanes in found)


def _scales(job: Job) -> dict[str, float]:
    """Return by module how much longer its computations take by the profile than by formula; 1 without a profile."""
    if not job.settings.schedule.profile:
        return {module.name: 1.0 for module in job.modules}
    profile, formula = job_costs(job), formula_costs(job).trained(job.graph)

    def seconds(costs: Costs, module: str) -> float:
        return sum(costs.seconds(kind, stage, 1) for stage in job.stages_of(module) for kind in ("forward", "backward"))

    return {
        module.name: seconds(profile, module.name) / (seconds(formula, module.name) or 1.0) for module in job.modules
    }
