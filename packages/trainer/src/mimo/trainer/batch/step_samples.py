"""Which samples each step reads: as many in all, or as many as have so many tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from mimo.data import SampleLayout, SampleOrder, TokenBatch, sizes_of, token_batch
from mimo.hooks import DataError, UserError
from mimo.trainer.job.job import Job

_REMEMBERED = 64
"""Steps whose batches are remembered, beside those that are read ahead."""
_PATIENCE = 1 << 10
"""So many samples one after another may be left out, or all that there are."""


class StepSamples:
    """The samples of each step of a run, and what has been read to find out how long they are; for any thread.

    By tokens a step begins where the one before ended. Steps are asked for one after the other, so that each is found
    by the samples after the last one; an earlier one is found again from where the run began.

    Args:
        job: the whole.
        order: in which samples are read.
        begun: steps of the run before its data began.
        step: at which this begins, from 1 on.
        position: of that step's first sample, where steps are by tokens.
    """

    def __init__(self, job: Job, order: SampleOrder, *, begun: int = 0, step: int = 1, position: int = 0) -> None:
        self.order = order
        self._job = job
        self._begun = begun
        self._tokens = job.settings.run.batch_tokens
        self._first = step, position
        self._remembered = job.settings.data.ahead + _REMEMBERED
        self._lock = threading.Lock()
        self._batches: dict[int, TokenBatch] = {}
        self._layouts: dict[int, SampleLayout] = {}

    def numbers(self, step: int) -> tuple[int, ...]:
        """Return the numbers of the samples of a step.

        Raises:
            DataError: how long they are can't be found out.
        """
        if self._tokens:
            return self._batch(step).samples
        with self._lock:  # an order remembers what it made last
            return self.order.samples(step - self._begun)

    def dropped(self, step: int) -> int:
        """Return how many samples a step leaves out, as they are too long; those of a step that was read."""
        return self._batch(step).dropped if self._tokens else 0

    def position(self, step: int) -> int | None:
        """Return the position at which a step begins whose samples, or those of the one before, were read.

        None where that follows from its number.
        """
        if not self._tokens:
            return None
        first, position = self._first
        return position if step == first else self._batch(step - 1).stop

    def take_layout(self, sample: int) -> SampleLayout | None:
        """Return the layout of a sample if it was laid out to find its step, which is not remembered any longer."""
        return self._layouts.pop(sample, None)

    def _batch(self, step: int) -> TokenBatch:
        found = self._batches.get(step)
        if found is not None:  # whoever asks for it need not wait for a later one to be read
            return found
        with self._lock:
            if step not in self._batches:
                known = [number for number in self._batches if number < step]
                first, position = self._first
                if known:
                    first, position = max(known) + 1, self._batches[max(known)].stop
                for number in range(first, step + 1):
                    self._batches[number] = self._read(position)
                    position = self._batches[number].stop
                    self._batches.pop(number - self._remembered, None)
            return self._batches[step]

    def _read(self, position: int) -> TokenBatch:
        dataset = self._job.train
        assert dataset is not None, "this job was resolved without training data"
        try:
            return token_batch(
                position,
                lambda first, count: self.order.read(first, count).tolist(),
                self._lengths,
                tokens=self._tokens,
                patience=max(_PATIENCE, len(dataset)),
            )
        except UserError:
            raise  # the dataset's own, with its place
        except ValueError as error:
            raise DataError(
                "data.longer",
                expected=f"samples of at most data.max_tokens = {self._job.settings.data.max_tokens} tokens",
                got=str(error),
                fix='Set data.max_tokens higher, or data.longer = "cut".',
            ) from error

    def _lengths(self, samples: Sequence[int]) -> Iterator[int | None]:
        """Yield how many tokens samples have, by an index or by laying them out; None for those that are dropped."""
        job = self._job
        assert job.train is not None
        drops = job.settings.data.longer == "drop"
        sizes = sizes_of(job.train, samples)
        if sizes is not None:
            for tokens, is_cut in zip(sizes.tokens.tolist(), sizes.cut.tolist(), strict=True):
                yield None if drops and is_cut else tokens
            return
        for sample in samples:
            layout = self._layouts.get(sample) or job.lay_out(job.train, sample)
            if drops and layout.truncated:
                yield None
                continue
            self._layouts[sample] = layout
            yield len(layout.tokens)
