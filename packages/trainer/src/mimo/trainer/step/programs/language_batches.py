"""Packed samples as a language model takes them: tensors on its device, and what is drawn at random for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mimo.data import NO_LABEL, Packed
from mimo.model.runtime import LanguageBatch, MtpLabels, sample_rows
from mimo.trainer.job.job import Job, JobModule


def draw_keys_of(packed: Packed, samples: Sequence[int], step: Tensor | None) -> Tensor | None:
    """Return by what layers draw at random, [T, 2] of packed rows; those of the padding are anything.

    Args:
        packed: the samples.
        samples: their numbers in the dataset.
        step: key of the step; None where nothing is drawn.
    """
    if step is None:
        return None
    numbers = torch.tensor([*samples, 0])[torch.from_numpy(packed.samples)]
    return sample_rows(step, numbers, torch.from_numpy(packed.positions))


def language_batch(
    packed: Packed,
    job: Job,
    device: torch.device,
    *,
    module: JobModule | None = None,
    trains: bool = True,
    draw_keys: Tensor | None = None,
) -> LanguageBatch:
    """Return packed samples as a language model takes them: tensors, with placeholders by encoder.

    Args:
        packed: the samples.
        job: the whole.
        device: where the tensors go.
        module: the language model; None: the one that is not a teacher.
        trains: whether what it is to predict further on is asked too.
        draw_keys: of `draw_keys_of`.
    """
    weights = packed.weights
    batch = LanguageBatch(
        tokens=torch.from_numpy(packed.tokens),
        labels=torch.from_numpy(packed.labels),
        positions=torch.from_numpy(packed.positions),
        lengths=packed.lengths,
        placeholders={
            module.name: torch.from_numpy(packed.placeholders[module.modality])
            for module in job.encoders_of(module or job.language)
            if module.modality in packed.placeholders
        },
        samples=torch.from_numpy(packed.samples),
        label_tokens=packed.label_tokens,
        labelled=torch.from_numpy(np.flatnonzero(packed.targets)),
        weights=None if weights is None else torch.from_numpy(weights.rows),
        weight_sums=None if weights is None else weights.sums,
        grid_positions=None if packed.grid_positions is None else torch.from_numpy(packed.grid_positions),
        mtp_labels=tuple(_mtp_labels(packed, k) for k in range(len(packed.next_labels)) if trains),
        used=int((packed.samples < len(packed.lengths)).sum()),
        items=packed.items,
        draw_keys=draw_keys,
    )
    return batch.to(device)


def _mtp_labels(packed: Packed, k: int) -> MtpLabels:
    """Return what packed samples are to predict k + 1 tokens after the next."""
    labels, counts = packed.next_labels[k], packed.next_counts[k]
    own = weights = None
    rows = np.flatnonzero(labels != NO_LABEL)
    if packed.weights is not None:
        own, weights = torch.from_numpy(packed.weights.next_rows[k]), packed.weights.next_sums[k]
        rows = np.flatnonzero(own)  # the others have labels too, which later depths read as their tokens
    return MtpLabels(torch.from_numpy(labels), torch.from_numpy(rows), counts, own, weights)
