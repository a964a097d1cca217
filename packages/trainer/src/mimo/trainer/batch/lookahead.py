"""The samples of later steps: cut and compared before they are needed; an error in them is saved until then.

A digest travels with a step's one message to all ranks. Each step compares the samples of the next step; where a step
already encodes the samples of the next one, it compares those of the step after that.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mimo.hooks import UserError
from mimo.launch import Heartbeat
from mimo.optimizer.runtime import LocalStats, ReducedStats
from mimo.trainer.batch.broken import BrokenSamples, faults
from mimo.trainer.batch.step_data import StepData

Digest = tuple[int, ...] | None


@attrs.frozen(kw_only=True)
class PendingBatch:
    """The samples of a step to come, whether all ranks take them to be the same, and why they can't be read.

    ``share`` is what this rank adds to the sums of an earlier step, by which ranks agree on them.
    """

    step: int
    data: StepData
    share: LocalStats
    identical: bool = True
    fault: UserError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known that would end the step as it begins; equal on all ranks."""
        return self.identical and self.fault is None


class BatchLookahead:
    """Looks at steps to come on one rank; call it on every rank of the world.

    Args:
        cut: of a step returns its samples.
        digest: of samples returns what is compared; None where it doesn't matter. A `UserError` is kept.
        broken: finds and marks samples that can't be decoded.
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
        broken: BrokenSamples,
        agree: Callable[[LocalStats], ReducedStats],
        reach: int,
        last: int,
        progress: Heartbeat,
    ) -> None:
        self._cut = cut
        self._digest = digest
        self._broken = broken
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
            self._pending.append(self._confirmed(batch, self._agree(batch.share)))
        return self._pending[0], self._pending[1] if self._reach > 1 and len(self._pending) > 1 else None

    def prepare_next(self, step: int) -> LocalStats:
        """Look at one step more as ``step`` is done, and return what is to be compared; `confirm` takes the result."""
        self._compares = step + self._reach <= self._last
        if self._compares:
            self._pending.append(self._read(step + self._reach))
        return self.compared

    @property
    def compared(self) -> LocalStats:
        """What `prepare_next` has returned, while its result is not known."""
        return self._pending[-1].share if self._compares else LocalStats()

    def confirm(self, agreed: ReducedStats) -> None:
        """Note what ranks have agreed on of what `prepare_next` looked at."""
        if self._compares:
            self._pending[-1] = self._confirmed(self._pending[-1], agreed)
        self._compares = False

    def _confirmed(self, batch: PendingBatch, agreed: ReducedStats) -> PendingBatch:
        equal = agreed.digests_equal
        fault = self._broken.agree(batch.step, batch.data, batch.fault, agreed.extra_sums, identical=equal)
        return attrs.evolve(batch, identical=equal, fault=fault)

    def _read(self, step: int) -> PendingBatch:
        with self._progress.within(f"{self._progress.doing}, reading the samples of step {step}"):
            data = self._cut(step)
            try:
                digest = self._digest(data)
                found = self._broken.find(step, data)
                return PendingBatch(step=step, data=data, share=LocalStats(digest=digest, extra_sums=found))
            except UserError as fault:  # raised when its step begins: this one is not lost for it
                share = LocalStats(extra_sums=faults(any_found=True))
                return PendingBatch(step=step, data=data, share=share, fault=fault)
