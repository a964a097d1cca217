"""Sizes of a step's samples as flat arrays, from an index or from layouts: what a placement follows from.

N samples, I items of a modality in them, sample by sample, K different sizes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import Dataset, PlacedMicrobatch, SampleLayout, SampleSizes, sizes_of
from mimo.hooks import DataError
from mimo.trainer.job.job import Job
from mimo.trainer.job.taught import is_taught, own_items, rows_of

Whole = NDArray[np.int64]
_TABLE = 4
"""Up to so many times as many as there are of them, numbers are looked up in a table."""
_MAX_NUMBER = 1 << 62


@attrs.frozen(kw_only=True, eq=False)
class ItemSizes:
    """The items of a modality.

    Args:
        samples: ``[I]`` the place in the step of the sample of each.
        rows: ``[I]`` of each.
        sizes: ``[K]``, all different.
        of_item: ``[I]`` which of the sizes each has.
    """

    samples: Whole
    rows: Whole
    sizes: Sequence[tuple[int, ...]]
    of_item: Whole


@attrs.frozen(kw_only=True, eq=False)
class StepSizes:
    """The samples of a step.

    Args:
        lengths: ``[N]`` rows of each, those of items included.
        labels: ``[N]`` rows of each that are learned from.
        items: by the modality of an encoder.
        taught: ``[M]`` places in the step of the samples that teachers read.
        shown: of those that the encoders of generators read, by module.
    """

    lengths: Whole
    labels: Whole
    items: Mapping[str, ItemSizes]
    taught: Whole
    shown: Mapping[str, ItemSizes] = attrs.field(factory=dict)

    @classmethod
    def of(cls, job: Job, dataset: Dataset, samples: Sequence[int]) -> StepSizes:
        """Return the sizes of samples, from an index where there is one; without it each is laid out.

        Raises:
            DataError: the index is damaged, or a sample can't be laid out.
        """
        known = sizes_of(dataset, samples)
        if known is not None:
            return cls.of_index(job, known)
        return cls.of_layouts(job, [job.lay_out(dataset, sample) for sample in samples])

    @classmethod
    def of_layouts(cls, job: Job, layouts: Sequence[SampleLayout]) -> StepSizes:
        """Return the sizes of samples that have been laid out."""
        shown = {module.name: _Gathered() for module in job.encoders if job.generator_of(module) is not None}
        found = {module.modality: _Gathered() for module in job.encoders}
        for position, layout in enumerate(layouts):
            for item in layout.items:
                if not item.runs:
                    continue
                found[item.info.modality].add(position, item.rows, item.info.size)
            for name, gathered in shown.items():
                for item in own_items(job, job.module(name), layout):
                    gathered.add(position, item.rows, item.info.size)
        return cls(
            lengths=np.array([len(layout.tokens) for layout in layouts], dtype=np.int64),
            labels=np.array([np.count_nonzero(layout.targets) for layout in layouts], dtype=np.int64),
            items={modality: own.sizes() for modality, own in found.items()},
            taught=np.flatnonzero([is_taught(job, layout) for layout in layouts if job.teachers]),
            shown={name: gathered.sizes() for name, gathered in shown.items()},
        )

    @classmethod
    def of_index(cls, job: Job, known: SampleSizes) -> StepSizes:
        """Return the same of samples of which an index knows the sizes."""
        samples = np.repeat(np.arange(len(known.tokens)), np.diff(known.first_item))
        numbers = {name: number for number, name in enumerate(known.modalities)}
        unread = ~np.isin(known.modality, [numbers.get(one, -1) for one in job.taught_modalities])
        items = np.bincount(samples[(known.kept != 0) & unread], minlength=len(known.tokens))
        return cls(
            lengths=known.tokens.astype(np.int64),
            labels=known.targets.astype(np.int64),
            items={
                module.modality: _of_index(known, samples, numbers.get(module.modality, -1)) for module in job.encoders
            },
            taught=np.flatnonzero(items == 0),
        )


def _of_index(known: SampleSizes, samples: Whole, modality: int) -> ItemSizes:
    items = _all_or((known.modality == modality) & (known.kept != 0))
    first, samples = known.first_size[:-1][items], samples[items]
    counts = known.first_size[1:][items] - first
    of_item, sizes = np.zeros(len(samples), dtype=np.int64), list[tuple[int, ...]]()
    for count in np.flatnonzero(np.bincount(counts)).tolist():
        own = _all_or(counts == count)
        begins = first[own]
        columns = [known.size[begins + number] for number in range(count)]
        which = numbered(_joined(columns, len(begins)))
        places = np.zeros(int(which.max()) + 1, dtype=np.int64)
        places[which] = np.arange(len(begins))
        of_item[own] = which + len(sizes)
        sizes += zip(*(column[places].tolist() for column in columns), strict=True) if count else [()]
    return ItemSizes(samples=samples, rows=known.rows[items].astype(np.int64), sizes=sizes, of_item=of_item)


def _all_or(chosen: NDArray[np.bool_]) -> Whole | slice:
    """Return where this is true, so that nothing is copied where it is so everywhere."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _joined(columns: Sequence[Whole], count: int) -> Whole:
    """Return a number for each of so many lines of columns, equal for equal lines only."""
    found, numbers = np.zeros(count, dtype=np.int64), 1  # below which they all are
    for column in columns:
        own = column - column.min()
        if numbers * (int(own.max()) + 1) > _MAX_NUMBER:
            found, own, numbers = numbered(found), numbered(own), count
        span = int(own.max()) + 1
        found = found * span + own
        numbers *= span
    return found


def numbered(values: Whole) -> Whole:
    """Return of each of some numbers from 0 on how many different ones are less."""
    span = int(values.max(initial=0)) + 1
    if span > _TABLE * len(values):
        found: Whole = np.unique(values, return_inverse=True)[1]
        return found
    is_there = np.zeros(span, dtype=np.int64)
    is_there[values] = 1
    return (np.cumsum(is_there) - 1)[values]


class _Gathered:
    """Items of a modality, one by one."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._rows: list[int] = []
        self._of_item: list[int] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def add(self, sample: int, rows: int, size: tuple[int, ...]) -> None:
        self._samples.append(sample)
        self._rows.append(rows)
        self._of_item.append(self._numbers.setdefault(size, len(self._numbers)))

    def sizes(self) -> ItemSizes:
        return ItemSizes(
            samples=np.array(self._samples, dtype=np.int64),
            rows=np.array(self._rows, dtype=np.int64),
            sizes=list(self._numbers),
            of_item=np.array(self._of_item, dtype=np.int64),
        )


def check_placed(job: Job, placed: PlacedMicrobatch, layouts: Sequence[SampleLayout], where: str) -> None:
    """Refuse samples that have more or fewer items than were placed; ``where`` names the first of them.

    Raises:
        DataError: the index says something else of them than they are.
    """
    for module, owners in zip(job.feeding, placed.items, strict=True):
        found = sum(len(rows_of(job, module, layout)) for layout in layouts)
        if found != owners.bounds[-1]:
            what = "samples for teachers" if module.distil is not None else f"items of modality {module.modality!r}"
            raise DataError(
                f"{len(layouts)} samples from {where}",
                expected=f"{owners.bounds[-1]} {what}, as the index says",
                got=f"{found}",
                fix="Run `mimo data index FILE` again.",
            )
