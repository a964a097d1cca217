"""Statistics of a few samples: lengths, labels and sizes of items, from ids and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from mimo.data import Dataset, SampleLayout
from mimo.hooks import DataError
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.taught import feeding_spans, is_taught, own_items

_SAMPLES = 32


@attrs.frozen(kw_only=True)
class MadeStats:
    """What a generator has to make of a few samples.

    Args:
        sizes: of the items.
        rows: from how many rows each is made.
        sent: how many rows it is sent for all of them, by each module that feeds it.
    """

    sizes: tuple[tuple[int, ...], ...] = ()
    rows: tuple[int, ...] = ()
    sent: Mapping[str, int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, job: Job, generator: JobModule, layouts: Sequence[SampleLayout]) -> MadeStats:
        """Return that of samples."""
        made = [layout for layout in layouts if layout.made(generator.modality)]
        fed = {
            source.name: [feeding_spans(job, generator, source, layout) for layout in made]
            for source in job.feeders_of(generator)
        }
        counts = [[stop - start for spans, _ in samples for start, stop in spans] for samples in fed.values()]
        return cls(
            sizes=tuple(item.info.size for layout in made for item in layout.made(generator.modality)),
            rows=tuple(map(sum, zip(*counts, strict=True))),
            sent={name: sum(rows for _, rows in samples) for name, samples in fed.items()},
        )


@attrs.frozen(kw_only=True)
class SampleStats:
    """Lengths, labels and item sizes of a few samples.

    Args:
        lengths: rows of each, those of items included.
        labels: number of rows that have labels of a weight other than 0, over all samples.
        sizes: of all their items that are read, by modality.
        read: of those that an encoder reads which does not feed the language model, by module.
        taught: for each sample whether teachers read it.
        taught_labels: number of the rows that they say something of, over all samples.
        made: what each generator has to make, by module.
    """

    lengths: tuple[int, ...]
    labels: int
    sizes: Mapping[str, tuple[tuple[int, ...], ...]]
    taught: tuple[bool, ...] = ()
    taught_labels: int = 0
    made: Mapping[str, MadeStats] = attrs.field(factory=dict)
    read: Mapping[str, tuple[tuple[int, ...], ...]] = attrs.field(factory=dict)

    def sizes_of(self, encoder: JobModule) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of the items that an encoder reads."""
        return self.read.get(encoder.name, self.sizes.get(encoder.modality, ()))

    def of_module(self, module: JobModule) -> SampleStats:
        """Return what of the samples a module reads: a teacher those alone that it teaches."""
        if module.distil is None:
            return self
        lengths = tuple(length for length, is_taught in zip(self.lengths, self.taught, strict=True) if is_taught)
        return SampleStats(lengths=lengths, labels=self.taught_labels, sizes={})

    @classmethod
    def of(cls, job: Job) -> SampleStats:
        """Return statistics of the first samples of the first step, or of held-out samples without training data.

        A sample that can't be read, or is dropped, is skipped: the step that needs it raises. Where none is left, one
        sample of text of the largest length is assumed.
        """
        layouts = [layout for layout in _layouts(job) if layout is not None]
        if not layouts:
            longest = job.settings.data.max_tokens
            return cls(lengths=(longest,), labels=longest, sizes={}, taught=(True,), taught_labels=longest)
        return cls.of_layouts(job, layouts)

    @classmethod
    def of_largest(cls, job: Job, counts: Iterable[int]) -> Mapping[int, SampleStats]:
        """Return by number statistics of the largest microbatches of a language lane that follow one another."""
        layouts, each = [layout for layout in _layouts(job) if layout is not None], lane_samples(job)
        every, found = cls.of(job), dict[int, SampleStats]()
        for count in counts:
            size = each * count
            parts = [layouts[first : first + size] for first in range(0, len(layouts) - size + 1, each)]
            largest = max(parts, key=lambda own: sum(len(layout.tokens) for layout in own), default=[])
            found[count] = cls.of_layouts(job, largest) if largest else every
        return found

    @classmethod
    def of_layouts(cls, job: Job, layouts: Sequence[SampleLayout]) -> SampleStats:
        """Return statistics of these samples."""
        infos = [item.info for layout in layouts for item in layout.items if item.runs]
        labels = [int(np.count_nonzero(layout.targets)) for layout in layouts]
        taught = [is_taught(job, layout) for layout in layouts] if job.teachers else [False] * len(layouts)
        return cls(
            lengths=tuple(len(layout.tokens) for layout in layouts),
            labels=sum(labels),
            sizes={
                module.modality: tuple(info.size for info in infos if info.modality == module.modality)
                for module in job.encoders
            },
            taught=tuple(taught),
            taught_labels=sum(number for number, own in zip(labels, taught, strict=True) if own),
            made={generator.name: MadeStats.of(job, generator, layouts) for generator in job.generators},
            read={
                module.name: tuple(item.info.size for layout in layouts for item in own_items(job, module, layout))
                for module in job.encoders
                if not module.feeds_language
            },
        )


def step_samples(job: Job, stats: SampleStats) -> float:
    """Return how many samples a step has, by tokens about, if all are like those of which there are statistics."""
    run = job.settings.run
    return run.global_batch or run.batch_tokens * len(stats.lengths) / max(sum(stats.lengths), 1)


def microbatch_samples(job: Job, stats: SampleStats) -> float:
    """Return how many samples all language lanes have in a microbatch, likewise."""
    run = job.settings.run
    if run.global_batch:
        return run.micro_batch * job.language.grid.dp
    return step_samples(job, stats) / job.microbatches


def lane_samples(job: Job) -> int:
    """Return how many samples a language lane has in a microbatch, by tokens about."""
    run = job.settings.run
    return (
        run.micro_batch
        if run.global_batch
        else max(round(microbatch_samples(job, SampleStats.of(job)) / job.language.grid.dp), 1)
    )


def _layouts(job: Job) -> list[SampleLayout | None]:
    if job.train is not None:
        first = job.sample_order().read(0, min(_SAMPLES, job.settings.most_samples)).tolist()
        return [_layout(job, job.train, sample) for sample in first]
    if job.evaluation is None:
        return []
    return [_layout(job, job.evaluation, sample) for sample in range(min(_SAMPLES, len(job.evaluation)))]


def _layout(job: Job, dataset: Dataset, sample: int) -> SampleLayout | None:
    try:
        found = job.lay_out(dataset, sample)
    except DataError:
        return None
    return None if found.truncated and job.settings.data.longer == "drop" else found
