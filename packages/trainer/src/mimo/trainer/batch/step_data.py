"""The samples of one step, cut into microbatches and placed on lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from operator import itemgetter

import attrs

from mimo.data import Dataset, SampleLayout
from mimo.hooks import DataError
from mimo.topology import Coordinates
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.route_cache import RouteCache
from mimo.trainer.batch.saved_samples import BrokenItems, KeptSamples
from mimo.trainer.cost.sample_costs import SampleCosts
from mimo.trainer.job.job import Job, JobModule


@attrs.frozen(kw_only=True)
class StepData:
    """The microbatches of one step or of one evaluation batch, made when they are first needed.

    Args:
        samples: number of samples.
        make: makes the microbatches, and says where each of their samples stands in the step.
    """

    samples: int
    make: Callable[[], Sequence[tuple[Microbatch, Sequence[int]]]]

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
        costs: SampleCosts | None = None,
    ) -> StepData:
        """Cut ``samples`` into ``microbatches`` of what the language lanes take at once.

        Args:
            job: the whole.
            dataset: has the samples.
            samples: their numbers.
            microbatches: how many.
            routes: remembers routes, for this step and later ones.
            kept: has what encoders are given, or keeps it.
            costs: by which samples and items are placed, from all headers of the step. None: they are cut in order,
                by count, and the last microbatches may be short.
        """
        each = job.settings.run.micro_batch * job.language.grid.dp
        assert len(samples) <= each * microbatches, (len(samples), each, microbatches)

        def by_count() -> Sequence[tuple[Microbatch, Sequence[int]]]:
            spans = [range(len(samples))[index * each : (index + 1) * each] for index in range(microbatches)]
            return [(Microbatch(job, dataset, samples[span.start : span.stop], routes, kept), span) for span in spans]

        def by_cost(costs: SampleCosts) -> Sequence[tuple[Microbatch, Sequence[int]]]:
            layouts = [job.lay_out(dataset, sample) for sample in samples]
            return [
                (
                    Microbatch(
                        job,
                        dataset,
                        [samples[position] for position in placed.samples],
                        routes,
                        kept,
                        placed,
                        tuple(layouts[position] for position in placed.samples),
                    ),
                    placed.samples,
                )
                for placed in costs.place(layouts, microbatches=microbatches)
            ]

        def make() -> Sequence[tuple[Microbatch, Sequence[int]]]:
            found = by_count() if costs is None else by_cost(costs)
            for module in job.model_graph.modules:
                for served in module.passes(microbatches):
                    whole = tuple(found[index][0] for index in served)
                    for microbatch in whole[1:] and whole:
                        microbatch.pass_with(module.name, whole)
            return found

        return cls(samples=len(samples), make=make)

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
    def _made(self) -> Sequence[tuple[Microbatch, Sequence[int]]]:
        return self.make()
