"""What samples and items cost the modules, by formula or profile, as plain numbers: what a placement follows from.

Everything follows from the job and the sizes of the step, by additions, products and quotients alone, so that all
ranks find the same numbers to the bit.
"""

from __future__ import annotations

import attrs
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
from mimo.model import EncoderSpec, GeneratorSpec
from mimo.schedule import Costs
from mimo.topology import StageId
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.cost.operations import module_operations
from mimo.trainer.cost.sample_stats import MadeStats, SampleStats
from mimo.trainer.cost.step_cost import formula_costs, job_costs
from mimo.trainer.cost.step_sizes import ItemSizes, StepSizes, Whole, numbered
from mimo.trainer.job.job import Job, JobModule

_EXACT = 8
"""Lengths of so many binary digits are computed; between longer ones that differ in these digits lies a line."""
_MAX_SIZES = 1 << 16
"""Sizes of items whose costs are remembered."""


@attrs.frozen(kw_only=True, eq=False)
class _Things:
    """What a module reads or makes for another one: T items or samples, sample by sample, of K different costs.

    Args:
        samples: ``[T]`` the place in the step of the sample of each.
        rows: ``[T]`` of each, what a lane holds of it.
        costs: ``[K]``.
        of_thing: ``[T]`` which of the costs each has.
    """

    samples: Whole
    rows: Whole
    costs: NDArray[np.float64]
    of_thing: Whole


class SampleCosts:
    """Operations of one sample or item on one rank of a lane, all pipeline ranks together, as forward and backward.

    Args:
        job: whose modules.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._scales = _scales(job)
        self._homes = {module.name: _homes(job, module) for module in job.beside}
        self._lengths: dict[tuple[str, int], float] = {}
        self._items: dict[tuple[str, tuple[int, ...], int], float] = {}
        self._labels = {module.name: self._of_label(module) for module in (job.language, *job.teachers)}

    @property
    def scales_text(self) -> str:
        """What of the costs follows neither from the job's settings nor from sizes, but from a profile."""
        return repr(sorted(self._scales.items()))

    def samples(self, lengths: Whole, labels: Whole, module: JobModule | None = None) -> NDArray[np.float64]:
        """Return what samples cost a language model.

        Args:
            lengths: ``[N]`` tokens of each.
            labels: ``[N]`` how many of these are learned from.
            module: a teacher; None: the one that learns.
        """
        module = module or self._job.language
        steps = _steps(lengths)
        low = lengths // steps * steps
        costs = self._at(low, module)
        costs += (self._at(low + steps, module) - costs) * (lengths - low) / steps
        costs += labels * self._labels[module.name]
        return costs

    def item(self, module: JobModule, size: tuple[int, ...], rows: int = 0) -> float:
        """Return what an item costs its encoder, or its generator, which makes it from so many rows."""
        key = (module.name, size, rows)
        if key not in self._items:
            if len(self._items) >= _MAX_SIZES:
                self._items.clear()
            if module.is_generator:
                made = MadeStats(sizes=(size,), rows=(rows,), sent={LANGUAGE: rows})
                stats = SampleStats(lengths=(1,), labels=0, sizes={}, made={module.name: made})
            else:
                stats = SampleStats(lengths=(1,), labels=0, sizes={module.modality: (size,)})
            self._items[key] = self._operations(module, stats)
        return self._items[key]

    def loads(self, sizes: StepSizes, *, microbatches: int) -> tuple[Loads, tuple[EncoderLoads, ...]]:
        """Return what a step of samples of these sizes costs the language model and each module beside it."""
        job = self._job
        things = [self._things_of(module, sizes) for module in job.beside]
        language, *beside = in_whole_numbers(
            [self.samples(sizes.lengths, sizes.labels), *(own.costs for own in things)]
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
                    costs=costs[own.of_thing],
                    rows=own.rows,
                    lanes=module.grid.dp,
                    stages=module.grid.pp,
                    passes=tuple(job.model_graph.by_name[module.name].passes(microbatches)),
                    samples=own.samples,
                    homes=self._homes[module.name],
                )
                for module, own, costs in zip(job.beside, things, beside, strict=True)
            ),
        )

    def _things_of(self, module: JobModule, sizes: StepSizes) -> _Things:
        if module.is_generator:
            return self._made_by(module, sizes.made[module.modality])
        if module.distil is not None:
            return self._taught_by(module, sizes)
        found = sizes.shown.get(module.name, sizes.items[module.modality])
        kept = np.isin(found.samples, sizes.taught) if module.is_of_teacher else slice(None)
        return _Things(
            samples=found.samples[kept],
            rows=found.rows[kept],
            costs=np.array([self.item(module, size) for size in found.sizes]),
            of_thing=found.of_item[kept],
        )

    def _taught_by(self, teacher: JobModule, sizes: StepSizes) -> _Things:
        """Return the samples that a teacher reads."""
        own = np.stack([sizes.lengths[sizes.taught], sizes.labels[sizes.taught]], axis=1)
        different, of_thing = np.unique(own, axis=0, return_inverse=True)
        return _Things(
            samples=sizes.taught,
            rows=own[:, 1],
            costs=self.samples(different[:, 0], different[:, 1], teacher),
            of_thing=of_thing.reshape(-1).astype(np.int64),
        )

    def _made_by(self, generator: JobModule, items: ItemSizes) -> _Things:
        """Return the samples that hold items for a generator to make, all of one by the same lane.

        An item made from many rows costs as one from a few less.
        """
        assert isinstance(generator.spec, GeneratorSpec), generator.name
        rows = items.rows // _steps(items.rows) * _steps(items.rows)
        pairs, of_pair = np.unique(np.stack([items.of_item, rows], axis=1), axis=0, return_inverse=True)
        costs = np.array([self.item(generator, items.sizes[size], count) for size, count in pairs.tolist()])
        targets = np.array([generator.spec.targets(generator.config, size) for size in items.sizes], dtype=np.int64)
        samples, of_sample = np.unique(items.samples, return_inverse=True)
        count = len(samples)
        return _Things(
            samples=samples,
            rows=np.bincount(of_sample, items.rows + targets[items.of_item], count).astype(np.int64),
            costs=np.bincount(of_sample, costs[of_pair.reshape(-1)], count).astype(np.float64),
            of_thing=np.arange(count),
        )

    def _of_label(self, module: JobModule) -> float:
        """Return what a row costs more that is learned from, or of which a teacher says something."""
        one, none = (
            SampleStats(lengths=(1,), labels=labels, sizes={}, taught=(True,), taught_labels=labels)
            for labels in (1, 0)
        )
        return self._operations(module, one) - self._operations(module, none)

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

    def _at(self, lengths: Whole, module: JobModule) -> NDArray[np.float64]:
        """Return what samples of these lengths cost without labels, each length computed once."""
        which = numbered(lengths)
        different = np.zeros(int(which.max(initial=-1)) + 1, dtype=np.int64)
        different[which] = lengths
        return np.array([self._length(length, module) for length in different.tolist()])[which]

    def _length(self, length: int, module: JobModule) -> float:
        key = (module.name, length)
        if key not in self._lengths:
            stats = SampleStats(lengths=(length,), labels=0, sizes={}, taught=(True,))
            self._lengths[key] = self._operations(module, stats) if length else 0.0
        return self._lengths[key]

    def _operations(self, module: JobModule, stats: SampleStats) -> float:
        """Return a rank's share of the operations of a module.

        Without a formula, a row of an encoder or a target of a generator is as costly as a token of the language model,
        whatever that is.
        """
        grid = module.grid
        if module.spec.flops is not None:
            found = module_operations(self._job, module.name, stats)
            total = found.forward + found.backward + found.repeated
        elif isinstance(module.spec, EncoderSpec):
            rows = sum(module.spec.rows(module.config, size) for size in stats.sizes_of(module))
            return rows * self._length(1, self._job.language)
        elif isinstance(module.spec, GeneratorSpec):
            targets = sum(module.spec.targets(module.config, size) for size in stats.made[module.name].sizes)
            return targets * self._length(1, self._job.language)
        else:
            total = float(sum(stats.of_module(module).lengths))
        return total * self._scales[module.name] / (grid.cp * grid.tp)


def sample_costs(job: Job) -> SampleCosts | None:
    """Return by what a job's training samples are placed; None where that is by count, or nothing is to be placed."""
    return SampleCosts(job) if job.balance == "cost" and _can_differ(job) else None


def _can_differ(job: Job) -> bool:
    """Tell whether there is more than one place for a sample or an item."""
    return job.plans[-1].microbatches > 1 or any(module.grid.dp > 1 for module in job.modules)


def _homes(job: Job, module: JobModule) -> tuple[tuple[int, ...], ...]:
    """Return for each language lane the lanes of a module between which rows need not travel, as they share a rank.

    What feeds teachers or generators alone feeds no language lane.
    """
    graph, language = job.model_graph, job.language.grid
    found: list[set[int]] = [set() for _ in range(language.dp)]
    if module.is_generator:
        own, other = graph.fed_stage(LANGUAGE, module.name), _last_stage(job, LANGUAGE)
    elif module.feeds_language:
        own, other = _last_stage(job, module.name), graph.fed_stage(module.name, LANGUAGE)
    else:
        return ((),) * language.dp
    ranks = set(graph.stage_ranks(own))
    for rank in graph.stage_ranks(other):
        if rank in ranks:
            found[language.coordinates(rank).dp].add(module.grid.coordinates(rank).dp)
    return tuple(tuple(sorted(lanes)) for lanes in found)


def _last_stage(job: Job, module: str) -> StageId:
    return StageId(module, job.model_graph.by_name[module].stages - 1)


def _steps(lengths: Whole) -> Whole:
    """Return of each length between how many there is one that is computed: 1 of short ones."""
    digits = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    steps: Whole = 1 << np.maximum(digits - _EXACT, 0)
    return steps


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
