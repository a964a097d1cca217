"""What is wrong with the samples of a step to come, found a step ahead and known to all ranks before it begins.

Each rank says in the agreement of a step whether it has found anything; where one has, all meet once more, and each
says what. A sample with an item that can't be decoded keeps its place and its rows, and counts for nothing. What can't
be left out ends the run on all ranks as its step begins.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import DataError, UserError, plain_text
from mimo.topology import Coordinates
from mimo.topology.collectives import all_gather_json
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.items.faults import fault_of, fields_of
from mimo.trainer.job.job import Job, JobModule

_ROUNDING = 1e-9
"""Of a share times a number of samples."""
FAULTS = "data.faults"
FAULT_SUMS: Mapping[str, int] = {FAULTS: 1}
"""What ranks sum in a step's message, by name its length: how many have found something wrong with a step to come."""


class BrokenSamples:
    """The broken samples that a run has met; equal on all ranks, but for what each has found itself.

    Args:
        job: the same on every rank.
        places: encoders whose items this rank decodes, each with where it stands in the encoder's grid.
        rank: this process; the first one reports what is left out.
        gather: returns what each rank says, by rank; collective.
    """

    def __init__(
        self,
        job: Job,
        places: Sequence[tuple[JobModule, Coordinates]],
        *,
        rank: int,
        gather: Callable[[Any], list[Any]] = all_gather_json,
    ) -> None:
        self._dataset = job.train
        self._share = job.settings.data.max_broken
        # Where a broken item ends the run, its step finds that out itself, unless it is encoded in the step before.
        self._places = tuple(place for place in places if self._share or place[0].prefetch)
        self._reports = rank == 0
        self._gather = gather
        self.known: set[int] = set()
        """Numbers of the broken samples, those of the run before it was resumed among them."""
        self._own: dict[int, Mapping[tuple[int, int], DataError]] = {}

    def find(self, step: int, data: StepData) -> Mapping[str, Tensor]:
        """Return what this rank adds to the sums for a step, when its items have been decoded as far as that matters.

        Raises:
            DataError: an item that this rank encodes a step ahead can't be decoded, and none may be left out.
        """
        own = data.find_broken(self._places) if self._places else {}  # which lays out all samples
        if own and not self._share:
            raise next(iter(own.values()))
        self._own[step] = own
        return faults(any_found=bool(own))

    def agree(
        self, step: int, data: StepData, fault: UserError | None, sums: Mapping[str, Tensor], *, identical: bool
    ) -> UserError | None:
        """Mark what ranks have found broken, and return why the run ends as the step begins; collective.

        Args:
            step: whose samples they are.
            data: its samples.
            fault: why this rank can't read them.
            sums: of all ranks.
            identical: whether all ranks take them to be the same.

        Returns:
            Its own fault on a rank that has one, that of the first rank with one on the others.
        """
        own = self._own.pop(step, {})
        if not sums[FAULTS].item():
            return None
        broken = [[*key, fields_of(error)] for key, error in own.items()]
        said = self._gather({"fault": None if fault is None else fields_of(fault), "broken": broken})
        if (other := next((each["fault"] for each in said if each["fault"] is not None), None)) is not None:
            return fault or fault_of(other)
        return self._mark(step, data, [item for each in said for item in each["broken"]]) if identical else None

    def _mark(self, step: int, data: StepData, broken: Sequence[Any]) -> DataError | None:
        """Mark items by place and index, and return why the run ends if these are of too many samples."""
        errors = {(place, index): fields for place, index, fields in reversed(broken)}
        places = sorted({place for place, _ in errors})
        data.mark_broken({place: {index for at, index in errors if at == place} for place in places})
        numbers, new = data.numbers, dict[int, int]()
        for place in places:
            if numbers[place] not in self.known:
                new.setdefault(numbers[place], place)
        assert self._dataset is not None
        allowed, count = math.floor(self._share * len(self._dataset) + _ROUNDING), len(self.known) + len(new)
        if new and count > allowed:  # they stay unknown: resumed before this step, the run ends here again
            return DataError(
                self._dataset.where(next(iter(new))),
                expected=f"items that can be decoded, in all but {allowed} of {len(self._dataset)} samples, as "
                f"data.max_broken = {self._share:g} says",
                got=f"the {_ordinal(count)} sample without",
                fix="Mend or remove the items, or raise data.max_broken.",
            )
        self.known |= set(new)
        for (place, _), fields in sorted(errors.items(), key=lambda each: each[0]):
            if self._reports and place in new.values():
                _report(f"step {step} leaves out a sample. {fault_of(fields)}")
        return None


def faults(*, any_found: bool) -> Mapping[str, Tensor]:
    """Return what a rank adds to `FAULT_SUMS`."""
    return {FAULTS: torch.tensor([float(any_found)], dtype=torch.float64)}


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
        sys.stderr.write(plain_text(f"mimo: {text}\n"))
        sys.stderr.flush()
