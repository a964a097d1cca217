"""Steps by tokens: each reads on where the one before ended, up to its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import MAX_BATCH_SAMPLES, DataPart, SampleOrder, TokenBatch, WeightChange, token_batch
from mimo.hooks import DataError

TOKENS = 20
LENGTHS = st.lists(st.one_of(st.none(), st.integers(0, TOKENS)), min_size=1, max_size=200).filter(any)


def steps(lengths: Sequence[int | None], count: int, asked: list[int] | None = None) -> list[TokenBatch]:
    """Return the first steps of an endless stream of the samples in turn."""

    def read(first: int, number: int) -> list[int]:
        return [place % len(lengths) for place in range(first, first + number)]

    def of(samples: Sequence[int]) -> Iterator[int | None]:
        for sample in samples:
            if asked is not None:
                asked.append(sample)
            yield lengths[sample]

    found: list[TokenBatch] = []
    for _ in range(count):
        first = found[-1].stop if found else 0
        found.append(token_batch(first, read, of, tokens=TOKENS, patience=len(lengths)))
    return found


@given(LENGTHS)
def test_steps_take_every_position_once_and_as_many_as_fit(lengths: list[int | None]) -> None:
    """In order, without those that are dropped, which are counted; the next one would not have fitted."""
    place = 0
    for batch in steps(lengths, 6):
        assert batch.first == place
        passed = [position % len(lengths) for position in range(batch.first, batch.stop)]
        taken = [lengths[sample] for sample in batch.samples]
        assert [sample for sample in passed if lengths[sample] is not None] == list(batch.samples)
        assert batch.dropped == len(passed) - len(batch.samples)
        total = sum(length or 0 for length in taken)
        following = lengths[batch.stop % len(lengths)]
        assert total <= TOKENS
        assert following is not None
        assert total + following > TOKENS
        place = batch.stop


def test_only_what_a_step_needs_is_measured() -> None:
    """It ends at the first sample that doesn't fit, which is measured once more for the next step."""
    asked: list[int] = []
    steps([7] * 100, 2, asked)
    assert asked == [0, 1, 2, 2, 3, 4]


def test_a_sample_that_can_not_be_read_begins_the_next_step() -> None:
    """The step before is not lost for it."""

    def of(samples: Sequence[int]) -> Iterator[int]:
        for sample in samples:
            if sample == 2:
                raise DataError("line 3", expected="text", got="none")
            yield 1

    def read(first: int, number: int) -> list[int]:
        return list(range(first, first + number))

    batch = token_batch(0, read, of, tokens=TOKENS, patience=1)
    assert (batch.samples, batch.stop) == ((0, 1), 2)
    with pytest.raises(DataError, match="line 3"):
        token_batch(2, read, of, tokens=TOKENS, patience=1)


def test_samples_without_tokens_fill_no_step_for_ever() -> None:
    """A step has so many samples at most."""
    (batch,) = steps([0], 1)
    assert len(batch.samples) == batch.stop == MAX_BATCH_SAMPLES


def test_a_stream_of_which_all_is_dropped_is_refused() -> None:
    """Instead of being read for ever."""
    with pytest.raises(ValueError, match="4 samples one after another are left out, the last of them sample 0"):
        steps([None, None, None], 1)


def test_weights_of_a_mixture_change_at_a_position() -> None:
    """Where steps have numbers of samples of their own: what is read before stays, and what is read after follows."""
    parts = _Parts()
    order = SampleOrder.of(parts, global_batch=0, seed=1)  # type: ignore[arg-type]  # its parts are all that is asked for
    changed = order.with_weights(5, {"a": 1.0, "b": 3.0}, position=13)
    assert changed.changes[1] == WeightChange(step=5, weights={"a": 1.0, "b": 3.0}, position=13)
    assert (changed.read(0, 13) == order.read(0, 13)).all()
    shares = [np.count_nonzero(one.read(13, 400) >= _Parts.SIZE) / 400 for one in (order, changed)]
    assert shares == pytest.approx([0.5, 0.75], abs=0.05)
    with pytest.raises(ValueError, match="global_batch: expected at least 1, got 0"):
        order.samples(1)
    with pytest.raises(ValueError, match=r"changes: expected positions that ascend from 0, got \[0, 0\]"):
        order.with_weights(5, {"a": 1.0, "b": 3.0}, position=0)


class _Parts:
    """Two parts of as many samples."""

    SIZE = 50

    def __len__(self) -> int:
        return 2 * self.SIZE

    def parts(self) -> Sequence[DataPart]:
        return [DataPart(name=name, samples=self.SIZE, weight=1.0) for name in ("a", "b")]
