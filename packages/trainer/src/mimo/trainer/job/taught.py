"""What of a sample the modules beside the language model read, and how many rows they send or are sent for it.

An encoder of the language model reads its items. A teacher reads samples of text and of what its own encoders read, and
sends the rows of these that are learned from; its encoders read the items of the same samples. A generator is sent the
rows from which it makes the items of a sample, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mimo.data import SampleLayout
from mimo.trainer.job.job import Job, JobModule


def is_taught(job: Job, layout: SampleLayout) -> bool:
    """Tell whether teachers read a sample: all of it, or nothing; to them, what is only made is text."""
    return {item.info.modality for item in layout.items if item.runs} <= job.taught_modalities


def taught_rows(job: Job, layout: SampleLayout) -> NDArray[np.bool_]:
    """Tell of each row ``[S]`` of a sample whether teachers say something of it."""
    return layout.targets if is_taught(job, layout) else np.zeros(len(layout.tokens), dtype=np.bool_)


def is_read(job: Job, module: JobModule, layout: SampleLayout) -> bool:
    """Tell whether a module reads a sample, or items of it: the language model and its encoders read all."""
    return not module.is_of_teacher or is_taught(job, layout)


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
    return [item.rows for item in layout.items_of(module.modality)]


def fed_rows(generator: JobModule, layout: SampleLayout) -> NDArray[np.bool_]:
    """Tell of each row ``[S]`` of a sample whether a generator makes an item from it."""
    found = np.zeros(len(layout.tokens), dtype=np.bool_)
    for item in layout.made(generator.modality):
        assert item.made_from is not None
        found[slice(*item.made_from)] = True
    return found
