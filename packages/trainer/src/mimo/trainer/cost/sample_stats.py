"""What samples are like: lengths, labels and sizes of a few of them, from ids and headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from mimo.data import NO_LABEL, Dataset, SampleLayout, StepSampler
from mimo.hooks import DataError
from mimo.trainer.job.job import Job

_SAMPLES = 32


@attrs.frozen(kw_only=True)
class Typical:
    """A few samples.

    Args:
        lengths: rows of each, those of items included.
        labels: how many of all of them have labels.
        sizes: of all their items, by modality.
    """

    lengths: tuple[int, ...]
    labels: int
    sizes: Mapping[str, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, job: Job) -> Typical:
        """Return the first samples of the first step, or of what is held out where nothing is trained on.

        One that can't be read is passed over: the step that needs it says so. Where none is left, a sample of text as
        long as one may be stands for all.
        """
        found = [layout for layout in _layouts(job) if layout is not None]
        if not found:
            longest = job.settings.data.max_tokens
            return cls(lengths=(longest,), labels=longest, sizes={})
        labels = sum(int(np.count_nonzero(layout.labels != NO_LABEL)) for layout in found)
        return cls.of_layouts(job, found, labels=labels)

    @classmethod
    def of_layouts(cls, job: Job, layouts: Sequence[SampleLayout], *, labels: int) -> Typical:
        """Return what these samples are like, which have so many labels."""
        infos = [item.info for layout in layouts for item in layout.items]
        return cls(
            lengths=tuple(len(layout.tokens) for layout in layouts),
            labels=labels,
            sizes={
                module.modality: tuple(info.size for info in infos if info.modality == module.modality)
                for module in job.encoders
            },
        )


def _layouts(job: Job) -> list[SampleLayout | None]:
    if job.train is not None:
        run = job.settings.run
        samples = StepSampler(len(job.train), run.global_batch, run.seed).samples(1)[:_SAMPLES]
        return [_layout(job, job.train, sample) for sample in samples]
    if job.evaluation is None:
        return []
    return [_layout(job, job.evaluation, sample) for sample in range(min(_SAMPLES, len(job.evaluation)))]


def _layout(job: Job, dataset: Dataset, sample: int) -> SampleLayout | None:
    try:
        return job.lay_out(dataset, sample)
    except DataError:
        return None
