"""What of a sample the modules beside the language model read, and how many rows they send or are sent for it.

An encoder of the language model reads its items. A teacher reads samples of text and of what its own encoders read, and
sends the rows of these that are learned from; its encoders read the items of the same samples. A generator is sent the
rows from which it makes the items of a sample, each once; its encoders read the items that stand before these.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import PlacedItem, SampleLayout
from mimo.model import EncoderSpec
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.job.job import Job, JobModule


def is_taught(job: Job, layout: SampleLayout) -> bool:
    """Tell whether teachers read a sample: all of it, or nothing; to them, what is only made is text."""
    return {item.info.modality for item in layout.items if item.runs} <= job.taught_modalities


def taught_rows(job: Job, layout: SampleLayout) -> NDArray[np.bool_]:
    """Tell of each row ``[S]`` of a sample whether teachers say something of it."""
    return layout.targets if is_taught(job, layout) else np.zeros(len(layout.tokens), dtype=np.bool_)


def is_read(job: Job, module: JobModule, layout: SampleLayout) -> bool:
    """Tell whether a module reads a sample, or items of it: the language model and its encoders read all."""
    if module.is_of_teacher:
        return is_taught(job, layout)
    if module.feeds_language:
        return True
    generators = (module,) if module.is_generator else job.generators_of(module)
    return any(layout.made(generator.modality) for generator in generators)


def own_items(job: Job, module: JobModule, layout: SampleLayout) -> tuple[PlacedItem, ...]:
    """Return the items of a sample that an encoder reads, or a generator makes, in order.

    Those that an encoder of generators alone reads have as many rows as it makes of each, which lie nowhere in the
    sample.
    """
    if not is_read(job, module, layout):
        return ()
    if module.is_generator:
        return layout.made(module.modality)
    if module.feeds_language or module.is_of_teacher:
        return layout.items_of(module.modality)
    assert isinstance(module.spec, EncoderSpec), module.name
    last = max(_last_made(generator, layout) for generator in job.generators_of(module))
    return tuple(
        attrs.evolve(item, runs=((0, module.spec.rows(module.config, item.info.size)),), grid=None)
        for item in layout.items_of(module.modality)
        if item.stop <= last
    )


def sent_items(job: Job, encoder: JobModule, taker: JobModule, layout: SampleLayout) -> tuple[PlacedItem, ...]:
    """Return those of its `own_items` of which an encoder sends the rows to a module that it feeds: the first ones.

    A generator is sent those of the items that stand before the last that it makes.
    """
    items = own_items(job, encoder, layout)
    return items[: _count_before(encoder, layout, _last_made(taker, layout))] if taker.is_generator else items


def _count_before(encoder: JobModule, layout: SampleLayout, position: int) -> int:
    """Return how many of the items of a sample that an encoder reads stand before a position."""
    return sum(item.stop <= position for item in layout.items_of(encoder.modality))


def _last_made(generator: JobModule, layout: SampleLayout) -> int:
    """Return where the last item begins that a generator makes of a sample; before all if it makes none."""
    return max((item.start for item in layout.made(generator.modality)), default=-1)


def rows_of(job: Job, module: JobModule, layout: SampleLayout) -> Sequence[int]:
    """Return what of a sample a module reads for another one, of each the rows that it sends.

    Of a generator it is the sample, if it is to make an item of it, with the rows that it is sent.
    """
    if not is_read(job, module, layout):
        return []
    if module.is_generator:
        return [int(np.count_nonzero(fed_rows(module, layout)))] if layout.made(module.modality) else []
    if module.distil is not None:
        return [int(np.count_nonzero(layout.targets))]
    return [item.rows for item in own_items(job, module, layout)]


def fed_rows(generator: JobModule, layout: SampleLayout) -> NDArray[np.bool_]:
    """Tell of each row ``[S]`` of a sample whether a generator makes an item from it."""
    found = np.zeros(len(layout.tokens), dtype=np.bool_)
    for item in layout.made(generator.modality):
        assert item.made_from is not None
        found[slice(*item.made_from)] = True
    return found


def feeding_spans(
    job: Job, generator: JobModule, source: JobModule, layout: SampleLayout
) -> tuple[list[tuple[int, int]], int]:
    """Return of each item that a generator makes of a sample from which rows it does, and the number of all.

    Args:
        job: the whole.
        generator: which.
        source: what feeds it, the language model or an encoder: the spans lie in the rows of this sample that it sends.
        layout: of the sample.
    """
    made = layout.made(generator.modality)
    if source.name == LANGUAGE:
        before = [0, *np.cumsum(fed_rows(generator, layout)).tolist()]
        spans = [item.made_from or (0, 0) for item in made]
        return [(before[start], before[stop]) for start, stop in spans], before[-1]
    rows = [item.rows for item in sent_items(job, source, generator, layout)]
    before = [0, *np.cumsum(rows, dtype=np.int64).tolist()]
    return [(0, before[_count_before(source, layout, item.start)]) for item in made], before[-1]
