"""Labels further on, packed."""

from __future__ import annotations

import numpy as np
import pytest

from mimo.data import NO_LABEL, SampleLayout, pack

NONE = NO_LABEL


def _layout(sample: int, labels: list[int]) -> SampleLayout:
    tokens = np.arange(len(labels), dtype=np.int64)
    return SampleLayout(
        sample=sample, tokens=tokens, labels=np.array(labels, dtype=np.int64), items=(), truncated=False
    )


SAMPLES = [_layout(0, [1, 2, NONE, 4, 5, 6, NONE]), _layout(1, []), _layout(2, [7, NONE]), _layout(3, [8, 9, 1, NONE])]
FURTHER = [
    [2, NONE, NONE, 5, 6, NONE, NONE, NONE, NONE, 9, 1, NONE, NONE],
    [NONE, NONE, NONE, 6, NONE, NONE, NONE, NONE, NONE, 1, NONE, NONE, NONE],
]


def test_each_is_the_label_of_a_later_row_of_the_sample() -> None:
    """Where that row and all before it, from the own one on, have labels."""
    packed = pack(SAMPLES, multiple=5, next_tokens=2)
    assert packed.next_labels.tolist() == [[*each, NONE, NONE] for each in FURTHER]
    assert packed.next_counts == ((3, 0, 0, 2), (1, 0, 0, 1))
    assert pack(SAMPLES).next_labels.shape == (0, 13)
    assert pack(SAMPLES).next_counts == ()


def test_further_on_than_any_sample_is_none() -> None:
    """Nor is there one where there is no sample."""
    packed = pack(SAMPLES[:1], next_tokens=9)
    assert packed.next_labels[4:].tolist() == [[NONE] * 7] * 5
    assert packed.next_counts == ((3,), (1,), *[(0,)] * 7)
    nothing = pack([], next_tokens=2)
    assert (nothing.next_labels.shape, nothing.next_counts) == ((2, 0), ((), ()))


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_them_out(size: int) -> None:
    """Each has those of its rows, which may look at rows of others; what is counted is the same."""
    whole = pack(SAMPLES, next_tokens=2)
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(size):
        own = pack(SAMPLES, context_size=size, context_rank=rank, next_tokens=2)
        assert own.next_counts == whole.next_counts
        keys = zip(own.samples.tolist(), own.positions.tolist(), strict=True)
        found |= dict(zip(keys, own.next_labels.T.tolist(), strict=True))
    keys = zip(whole.samples.tolist(), whole.positions.tolist(), strict=True)
    assert [found[key] for key in keys] == whole.next_labels.T.tolist()
