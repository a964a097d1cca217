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
from mimo.model import EncoderSpec
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.measured_dataset import index_command
from mimo.trainer.job.taught import is_taught, own_items, rows_of

Whole = NDArray[np.int64]
_TABLE = 4
"""Up to so many times as many as there are of them, numbers are looked up in a table."""
_MAX_NUMBER = 1 << 62


@attrs.frozen(kw_only=True, eq=False)
class ItemSizes:
    """The items of a modality that are read, or those that are made.

    Args:
        samples: ``[I]`` the place in the step of the sample of each.
        rows: ``[I]`` of each; of one that is made, those from which it is.
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
        made: by the modality of a generator.
        taught: ``[M]`` places in the step of the samples that teachers read.
        shown: of those that encoders of generators alone read, by module.
    """

    lengths: Whole
    labels: Whole
    items: Mapping[str, ItemSizes]
    made: Mapping[str, ItemSizes]
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
        return cls.of_layouts(job, job.lay_out_all(dataset, samples))

    @classmethod
    def of_layouts(cls, job: Job, layouts: Sequence[SampleLayout]) -> StepSizes:
        """Return the sizes of samples that have been laid out."""
        shown = {module.name: _Gathered() for module in job.encoders if not _is_placed(module)}
        found = {module.modality: _Gathered() for module in job.encoders}
        made = {module.modality: _Gathered() for module in job.generators}
        for position, layout in enumerate(layouts):
            for item in layout.items:
                if item.runs:
                    found[item.info.modality].add(position, item.rows, item.info.size)
                if item.made_from is not None:
                    start, stop = item.made_from
                    made[item.info.modality].add(position, stop - start, item.info.size)
            for name, gathered in shown.items():
                for item in own_items(job, job.module(name), layout):
                    gathered.add(position, item.rows, item.info.size)
        return cls(
            lengths=np.array([len(layout.tokens) for layout in layouts], dtype=np.int64),
            labels=np.array([np.count_nonzero(layout.targets) for layout in layouts], dtype=np.int64),
            items={modality: own.sizes() for modality, own in found.items()},
            made={modality: own.sizes() for modality, own in made.items()},
            taught=np.flatnonzero([is_taught(job, layout) for layout in layouts if job.teachers]),
            shown={name: gathered.sizes() for name, gathered in shown.items()},
        )

    @classmethod
    def of_index(cls, job: Job, known: SampleSizes) -> StepSizes:
        """Return the same of samples of which an index knows the sizes."""
        samples = np.repeat(np.arange(len(known.tokens)), np.diff(known.first_item))
        numbers = {name: number for number, name in enumerate(known.modalities)}
        kept = known.kept != 0
        read, made = kept & known.is_read(), kept & known.is_made()
        untaught = ~np.isin(known.modality, [numbers.get(one, -1) for one in job.taught_modalities])
        items = np.bincount(samples[read & untaught], minlength=len(known.tokens))

        def chosen(module: JobModule, used: NDArray[np.bool_], rows: NDArray[np.int32]) -> ItemSizes:
            own = used & (known.modality == numbers.get(module.modality, -1))
            return _of_index(known, samples, _all_or(own), rows)

        def shown(encoder: JobModule) -> ItemSizes:
            modalities = [numbers.get(generator.modality, -1) for generator in job.generators_of(encoder)]
            makes = np.flatnonzero(made & np.isin(known.modality, modalities))
            last = np.full(len(known.tokens), -1)
            last[samples[makes]] = makes  # of several the last one is written last
            found = chosen(encoder, read & (np.arange(len(samples)) < last[samples]), known.rows)
            assert isinstance(encoder.spec, EncoderSpec), encoder.name
            rows = np.array([encoder.spec.rows(encoder.config, size) for size in found.sizes], dtype=np.int64)
            return attrs.evolve(found, rows=rows[found.of_item])

        return cls(
            lengths=known.tokens.astype(np.int64),
            labels=known.targets.astype(np.int64),
            items={module.modality: chosen(module, read, known.rows) for module in job.encoders},
            made={module.modality: chosen(module, made, known.made_from) for module in job.generators},
            taught=np.flatnonzero(items == 0),
            shown={module.name: shown(module) for module in job.encoders if not _is_placed(module)},
        )


def _is_placed(encoder: JobModule) -> bool:
    """Tell whether samples hold the rows of an encoder: those that generators alone are sent lie nowhere in them."""
    return encoder.feeds_language or encoder.is_of_teacher


def _of_index(known: SampleSizes, samples: Whole, items: Whole | slice, rows: NDArray[np.int32]) -> ItemSizes:
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
    return ItemSizes(samples=samples, rows=rows[items].astype(np.int64), sizes=sizes, of_item=of_item)


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


def check_placed(job: Job, placed: PlacedMicrobatch, layouts: Sequence[SampleLayout], dataset: Dataset) -> None:
    """Refuse samples of a dataset that have more or fewer items than were placed.

    Raises:
        DataError: the index says something else of them than they are.
    """
    for module, owners in zip(job.beside, placed.items, strict=True):
        found = sum(len(rows_of(job, module, layout)) for layout in layouts)
        if found != owners.bounds[-1]:
            what = f"items of modality {module.modality!r}"
            if module.distil is not None:
                what = "samples for teachers"
            elif module.is_generator:
                what = f"samples with {what} to make"
            raise DataError(
                f"{len(layouts)} samples from {dataset.where(layouts[0].sample)}",
                expected=f"{owners.bounds[-1]} {what}, as the index says",
                got=f"{found}",
                fix=f"Run {index_command(dataset)} again.",
            )
