"""Samples with items that can't be decoded: each keeps its place and its rows, and counts for nothing.

Who decodes an item finds out a step ahead. The places of such samples travel with the agreement of a step, as
the digest of all samples does, so that all ranks give weight 0 to the same ones before the step begins that has them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mimo.hooks import DataError, plain_text
from mimo.topology import Coordinates
from mimo.trainer.batch.microbatch import BrokenItem
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.job.job import Job, JobModule

_ROUNDING = 1e-9
"""Of a share times a number of samples."""
BROKEN = "data.broken"
"""Name of the broken samples in the step's message: for each place in the step, how many ranks have found it broken."""


def broken_sums(job: Job) -> Mapping[str, int]:
    """Return what ranks sum for it, by name its length; nothing where the first broken sample ends the run."""
    return {BROKEN: job.settings.most_samples} if job.settings.data.max_broken else {}


class BrokenSamples:
    """The broken samples that a run has met; equal on all ranks, but for what each has found itself.

    Args:
        job: the same on every rank.
        places: encoders whose items this rank decodes, each with where it stands in the encoder's grid.
    """

    def __init__(self, job: Job, places: Sequence[tuple[JobModule, Coordinates]]) -> None:
        data = job.settings.data
        self._dataset = job.train
        self._places = tuple(places)
        self._share = data.max_broken
        self.extra_sums = broken_sums(job)
        """What ranks sum for it."""
        self._batch = self.extra_sums.get(BROKEN, 0)
        self.known: set[int] = set()
        """Numbers of the broken samples, those of the run before it was resumed among them."""
        self._own: dict[int, Mapping[int, BrokenItem]] = {}

    def find(self, step: int, data: StepData) -> Mapping[str, Tensor]:
        """Return what this rank adds to the sums for a step, when all of its items have been decoded."""
        if not self._batch:
            return {}
        self._own[step] = data.find_broken(self._places)
        found = torch.zeros(self._batch, dtype=torch.float64)
        found[list(self._own[step])] = 1
        return {BROKEN: found}

    def mark(self, step: int, data: StepData, sums: Mapping[str, Tensor]) -> DataError | None:
        """Mark the samples that ranks have found broken, and return why the run ends if these are too many.

        Args:
            step: whose samples they are.
            data: its samples.
            sums: of all ranks.
        """
        if not self._batch:
            return None
        broken = sums[BROKEN].nonzero().flatten().tolist()
        own = self._own.pop(step, {})
        if not broken:
            return None
        data.mark_broken(broken)
        numbers = data.numbers
        places = {numbers[place]: place for place in reversed(broken)}
        new = [number for number in reversed(places) if number not in self.known]
        self.known |= set(new)
        assert self._dataset is not None
        allowed = math.floor(self._share * len(self._dataset) + _ROUNDING)
        if new and len(self.known) > allowed:
            return DataError(
                self._dataset.where(new[0]),
                expected=f"items that can be decoded, in all but {allowed} of {len(self._dataset)} samples, as "
                f"data.max_broken = {self._share:g} says",
                got=f"the {_ordinal(len(self.known))} sample without",
                fix="Mend or remove the items, or raise data.max_broken.",
            )
        for number in new:
            if places[number] in own and own[places[number]].is_first:
                _report(f"step {step} leaves out a sample. {own[places[number]].error}")
        return None


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
        sys.stderr.write(plain_text(f"mimo: {text}\n"))
        sys.stderr.flush()
