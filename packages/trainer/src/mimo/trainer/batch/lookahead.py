"""The samples of later steps: cut and compared before they are needed; an error in them is saved until then.

A digest travels with a step's one message to all ranks. Each step compares the samples of the next step; where a step
already encodes the samples of the next one, it compares those of the step after that.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mimo.hooks import UserError
from mimo.launch import Heartbeat
from mimo.optimizer.runtime import WORDS, LocalStats, ReducedStats
from mimo.trainer.batch.step_data import StepData

Digest = tuple[int, ...] | None
_UNREADABLE = (0,) * WORDS
"""The digest of samples that can't be read, so that other ranks learn of it."""


@attrs.frozen(kw_only=True)
class PendingBatch:
    """The samples of a step to come, whether all ranks take them to be the same, and why they can't be read here."""

    step: int
    data: StepData
    digest: Digest
    identical: bool = True
    fault: UserError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known that would end the step as it begins; equal on all ranks that hold modules."""
        return self.identical and self.fault is None


class BatchLookahead:
    """Looks at steps to come on one rank; call it on every rank of the world.

    Args:
        cut: of a step returns its samples.
        digest: of samples returns what is compared; None where it doesn't matter. A `UserError` is kept.
        agree: compares digests with all ranks.
        reach: by how many steps it is ahead: 2 where the next step must be known to begin this one.
        last: step of the run.
        progress: where it says that samples are read.
    """

    def __init__(
        self,
        *,
        cut: Callable[[int], StepData],
        digest: Callable[[StepData], Digest],
        agree: Callable[[LocalStats], ReducedStats],
        reach: int,
        last: int,
        progress: Heartbeat,
    ) -> None:
        self._cut = cut
        self._digest = digest
        self._agree = agree
        self._reach = reach
        self._last = last
        self._progress = progress
        self._pending: list[PendingBatch] = []
        self._compares = False

    def batches(self, step: int) -> tuple[PendingBatch, PendingBatch | None]:
        """Return ``step``, and if it is within reach and in the run the one after; what is unknown is compared now."""
        known = [batch for batch in self._pending if batch.step >= step]
        self._pending = known if known and known[0].step == step else []
        while len(self._pending) < self._reach and (not self._pending or self._pending[-1].step < self._last):
            batch = self._read(step + len(self._pending))
            self._pending.append(
                attrs.evolve(batch, identical=self._agree(LocalStats(digest=batch.digest)).digests_equal)
            )
        return self._pending[0], self._pending[1] if self._reach > 1 and len(self._pending) > 1 else None

    def prepare_next(self, step: int) -> Digest:
        """Look at one step more as ``step`` is done, and return what is to be compared; tell `confirm` the result."""
        self._compares = step + self._reach <= self._last
        if not self._compares:
            return None
        self._pending.append(self._read(step + self._reach))
        return self._pending[-1].digest

    @property
    def compared(self) -> Digest:
        """What `prepare_next` has returned, while its result is not known."""
        return self._pending[-1].digest if self._compares else None

    def confirm(self, *, identical: bool) -> None:
        """Note whether the digests of what `prepare_next` looked at were the same."""
        if self._compares:
            self._pending[-1] = attrs.evolve(self._pending[-1], identical=identical)
        self._compares = False

    def mark_failed(self, step: int, fault: UserError) -> None:
        """Note why a step will fail as it begins."""
        self._pending = [attrs.evolve(it, fault=it.fault or fault) if it.step == step else it for it in self._pending]

    def _read(self, step: int) -> PendingBatch:
        with self._progress.within(f"{self._progress.doing}, reading the samples of step {step}"):
            data = self._cut(step)
            try:
                return PendingBatch(step=step, data=data, digest=self._digest(data))
            except UserError as fault:  # raised when its step begins: this one is not lost for it
                return PendingBatch(step=step, data=data, digest=_UNREADABLE if self._reach > 1 else None, fault=fault)
