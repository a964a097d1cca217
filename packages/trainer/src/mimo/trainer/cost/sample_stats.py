"""Statistics of a few samples: lengths, labels and sizes of items, from ids and headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from mimo.data import Dataset, SampleLayout
from mimo.hooks import DataError
from mimo.trainer.job.job import Job

_SAMPLES = 32


@attrs.frozen(kw_only=True)
class SampleStats:
    """Lengths, labels and item sizes of a few samples.

    Args:
        lengths: rows of each, those of items included.
        labels: number of rows that have labels of a weight other than 0, over all samples.
        sizes: of all their items, by modality.
    """

    lengths: tuple[int, ...]
    labels: int
    sizes: Mapping[str, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, job: Job) -> SampleStats:
        """Return statistics of the first samples of the first step, or of held-out samples without training data.

        A sample that can't be read is skipped: the step that needs it raises. Where none is left, one sample of text
        of the largest length is assumed.
        """
        layouts = [layout for layout in _layouts(job) if layout is not None]
        if not layouts:
            longest = job.settings.data.max_tokens
            return cls(lengths=(longest,), labels=longest, sizes={})
        return cls.of_layouts(job, layouts)

    @classmethod
    def of_layouts(cls, job: Job, layouts: Sequence[SampleLayout]) -> SampleStats:
        """Return statistics of these samples."""
        infos = [item.info for layout in layouts for item in layout.items]
        return cls(
            lengths=tuple(len(layout.tokens) for layout in layouts),
            labels=sum(int(np.count_nonzero(layout.targets)) for layout in layouts),
            sizes={
                module.modality: tuple(info.size for info in infos if info.modality == module.modality)
                for module in job.encoders
            },
        )


def _layouts(job: Job) -> list[SampleLayout | None]:
    if job.train is not None:
        return [_layout(job, job.train, sample) for sample in job.sample_order().samples(1)[:_SAMPLES]]
    if job.evaluation is None:
        return []
    return [_layout(job, job.evaluation, sample) for sample in range(min(_SAMPLES, len(job.evaluation)))]


def _layout(job: Job, dataset: Dataset, sample: int) -> SampleLayout | None:
    try:
        return job.lay_out(dataset, sample)
    except DataError:
        return None
