"""What of a sample the modules that feed another one read, and how many rows they send for it.

An encoder of the language model reads its items. A teacher reads samples of text and of what its own encoders read, and
sends the rows of these that are learned from; its encoders read the items of the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mimo.data import SampleLayout
from mimo.trainer.job.job import Job, JobModule


def is_taught(job: Job, layout: SampleLayout) -> bool:
    """Tell whether teachers read a sample: all of it, or nothing."""
    return not layout.items or {item.info.modality for item in layout.items} <= job.taught_modalities


def taught_rows(job: Job, layout: SampleLayout) -> NDArray[np.bool_]:
    """Tell of each row ``[S]`` of a sample whether teachers say something of it."""
    return layout.targets if is_taught(job, layout) else np.zeros(len(layout.tokens), dtype=np.bool_)


def is_read(job: Job, module: JobModule, layout: SampleLayout) -> bool:
    """Tell whether a module reads a sample, or items of it: the language model and its encoders read all."""
    return not module.is_of_teacher or is_taught(job, layout)


def rows_of(job: Job, module: JobModule, layout: SampleLayout) -> Sequence[int]:
    """Return what of a sample a module that feeds another one reads: of each the rows that it sends."""
    if not is_read(job, module, layout):
        return []
    if module.distil is not None:
        return [int(np.count_nonzero(layout.targets))]
    return [item.rows for item in layout.items_of(module.modality)]
