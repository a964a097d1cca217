"""The samples of one step, cut into microbatches and placed on lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias

import attrs

from mimo.data import Dataset, SampleLayout, sizes_of
from mimo.hooks import DataError
from mimo.topology import Coordinates
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.route_cache import RouteCache
from mimo.trainer.batch.saved_samples import BrokenItems, KeptSamples
from mimo.trainer.cost.sample_costs import SampleCosts
from mimo.trainer.cost.step_sizes import StepSizes
from mimo.trainer.job.job import Job, JobModule

Made: TypeAlias = Sequence[tuple[Microbatch, Sequence[int]]]
"""Microbatches, and where each of their samples stands in the step."""


def _unknown(_sample: int) -> None:
    return None


@attrs.frozen(kw_only=True)
class StepData:
    """The microbatches of one step or of one evaluation batch, made when they are first needed.

    Args:
        make: makes the microbatches, and says where each of their samples stands in the step.
    """

    make: Callable[[], Made]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which samples of the dataset they are."""
        return tuple(layout.sample for microbatch in self.microbatches for layout in microbatch.layouts)

    @property
    def broken(self) -> BrokenItems:
        """The samples that count for nothing, as items of them can't be decoded."""
        layouts = (layout for microbatch in self.microbatches for layout in microbatch.layouts)
        indices = [tuple(item.info.index for item in layout.items if item.is_broken) for layout in layouts]
        return {place: found for place, found in enumerate(indices) if found}

    def find_broken(self, places: Sequence[tuple[JobModule, Coordinates]]) -> dict[tuple[int, int], DataError]:
        """Return by place and index which items this rank can't decode, when all have been prepared ahead."""
        found, first = dict[tuple[int, int], DataError](), 0
        for microbatch in self.microbatches:
            found |= {(first + at, index): error for (at, index), error in microbatch.find_broken(places).items()}
            first += len(microbatch.layouts)
        return found

    def mark_broken(self, broken: Mapping[int, Collection[int]]) -> None:
        """Have the samples at these places count for nothing, and their items of these indices be zeros."""
        first = 0
        for microbatch in self.microbatches:
            count = len(microbatch.layouts)
            own = {place - first: found for place, found in broken.items() if first <= place < first + count}
            microbatch.mark_broken(own)
            first += count

    @classmethod
    def cut(
        cls,
        job: Job,
        dataset: Dataset,
        samples: Sequence[int],
        *,
        microbatches: int,
        routes: RouteCache | None = None,
        kept: KeptSamples | None = None,
    ) -> StepData:
        """Cut samples in order into microbatches of what the language lanes take at once; the last may be short.

        Args:
            job: the whole.
            dataset: has the samples.
            samples: their numbers.
            microbatches: how many.
            routes: remembers routes, for these samples and later ones.
            kept: has what encoders are given, or keeps it.
        """
        parts = _Parts(job=job, dataset=dataset, routes=routes, kept=kept)
        return cls(make=lambda: parts.by_count(samples, microbatches))

    @classmethod
    def of_step(
        cls,
        job: Job,
        dataset: Dataset,
        samples: Callable[[], Sequence[int]],
        *,
        costs: SampleCosts | None,
        routes: RouteCache | None = None,
        kept: KeptSamples | None = None,
        known: Callable[[int], SampleLayout | None] = _unknown,
    ) -> StepData:
        """Cut the samples of a step of training into microbatches, and place them and their items on lanes.

        Args:
            job: the whole; its settings say how many microbatches there are, or how many tokens each has.
            dataset: has the samples.
            samples: returns their numbers.
            costs: by which samples and items are placed, from the sizes of the step: those of an index, or else of all
                headers. None: in order, by count.
            routes: remembers routes, for this step and later ones.
            kept: has what encoders are given, or keeps it.
            known: returns layouts of samples that have been laid out before.
        """
        parts = _Parts(job=job, dataset=dataset, routes=routes, kept=kept, known=known)

        def make() -> Made:
            numbers = samples()
            if costs is None and not job.settings.run.batch_tokens:
                return parts.by_count(numbers, job.microbatches)  # before any of them is read
            return parts.placed(numbers, costs or SampleCosts(job), balanced=costs is not None)

        return cls(make=make)

    @cached_property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """All of them, in the order of the step.

        Raises:
            DataError: a sample can't be laid out, where they are placed by cost.
        """
        return tuple(microbatch for microbatch, _ in self._made)

    @property
    def layouts(self) -> list[SampleLayout]:
        """The layouts of all samples, in the order of the step, wherever they are placed."""
        found = [
            pair for microbatch, positions in self._made for pair in zip(positions, microbatch.layouts, strict=True)
        ]
        return [layout for _, layout in sorted(found, key=itemgetter(0))]

    @cached_property
    def _made(self) -> Made:
        return self.make()


@attrs.frozen(kw_only=True)
class _Parts:
    """Makes microbatches of samples."""

    job: Job
    dataset: Dataset
    routes: RouteCache | None = None
    kept: KeptSamples | None = None
    known: Callable[[int], SampleLayout | None] = _unknown

    def by_count(self, samples: Sequence[int], microbatches: int) -> Made:
        """Cut samples in order into so many microbatches."""
        each = self.job.settings.run.micro_batch * self.job.language.grid.dp
        assert len(samples) <= each * microbatches, (len(samples), each, microbatches)
        spans = [range(len(samples))[index * each : (index + 1) * each] for index in range(microbatches)]
        return self._joined(
            [
                (Microbatch(self.job, self.dataset, samples[span.start : span.stop], self.routes, self.kept), span)
                for span in spans
            ]
        )

    def placed(self, samples: Sequence[int], costs: SampleCosts, *, balanced: bool) -> Made:
        """Return microbatches of samples that are placed by their sizes."""
        layouts: list[SampleLayout] | None = None
        known = sizes_of(self.dataset, samples)
        laid_out = [self.known(sample) for sample in samples]  # taken in any case, so that none is held
        if known is None:
            unknown = [sample for sample, found in zip(samples, laid_out, strict=True) if found is None]
            own = iter(self.job.lay_out_all(self.dataset, unknown))
            layouts = [found or next(own) for found in laid_out]
            sizes = StepSizes.of_layouts(self.job, layouts)
        else:
            sizes = StepSizes.of_index(self.job, known)
        found = []
        for one in costs.place(sizes, balanced=balanced):
            numbers = [samples[position] for position in one.samples]
            placed = None if layouts is None else tuple(layouts[position] for position in one.samples)
            microbatch = Microbatch(self.job, self.dataset, numbers, self.routes, self.kept, one, placed)
            found.append((microbatch, one.samples))
        return self._joined(found)

    def _joined(self, made: Made) -> Made:
        """Have microbatches know with which others they share a pass of a module."""
        for module in self.job.model_graph.modules:
            for served in module.passes(len(made)):
                whole = tuple(made[index][0] for index in served)
                for microbatch in whole[1:] and whole:
                    microbatch.pass_with(module.name, whole)
        return made
