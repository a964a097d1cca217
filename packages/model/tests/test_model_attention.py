"""Attention over packed segments against attention with an explicit mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mimo.model.runtime import Segments, attend
from mimo.model.runtime._attention import _buckets

LENGTHS = [
    (5, 5, 5),
    (3, 5, 4, 1, 0, 5, 2),
    (40, 33, 7, 35, 90, 0, 41, 90),
    (1,),
    (0, 0),
    (),
]


def _masked(inputs: Sequence[Tensor], lengths: Sequence[int], *, causal: bool) -> Tensor:
    """Attention of query, key and value [T, N, D] with a [T, T] mask; rows beyond the segments give zeros."""
    query, key, value = inputs
    rows, heads, width = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    segment = torch.full((rows,), -1)
    segment[: sum(lengths)] = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
    )
    sees = (segment.unsqueeze(1) == segment) & (segment >= 0)
    if causal:
        sees &= torch.ones(rows, rows, dtype=torch.bool).tril()
    scores = torch.einsum("tnd,snd->nts", query, key) / math.sqrt(width)
    weights = torch.where(sees, scores, -1e30).softmax(-1) * sees
    return torch.einsum("nts,snd->tnd", weights, value)


def _check_attention(_rank: int) -> None:
    for lengths in LENGTHS:
        for causal in (True, False):
            for heads, kv_heads, padding in ((4, 4, 0), (4, 2, 3), (6, 1, 1)):
                rows = sum(lengths) + padding
                torch.manual_seed(rows)
                plain = [torch.randn(rows, n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
                gradient = torch.randn(rows, heads, 8, dtype=torch.float64)
                ours = query, key, value = [x.clone().requires_grad_() for x in plain]
                theirs = [x.clone().requires_grad_() for x in plain]
                segments = Segments.of(lengths, causal=causal, rows=rows)
                found = attend(query, key, value, segments)
                wanted = _masked(theirs, lengths, causal=causal)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
                assert not found[sum(lengths) :].any()
                found.backward(gradient)
                wanted.backward(gradient)
                for one, other in zip(ours, theirs, strict=True):
                    mine = torch.zeros_like(one) if one.grad is None else one.grad
                    torch.testing.assert_close(mine, other.grad, rtol=0, atol=1e-12)


def test_equals_attention_with_a_mask(run_ranks: Callable[..., list[Any]]) -> None:
    """Values and gradients are those of masked attention: any lengths, empty ones, shared heads, padding at the end."""
    run_ranks(1, _check_attention)


def test_equal_lengths_are_one_call_in_place() -> None:
    """Segments of one length need no reordering."""
    segments = Segments.of((4, 4, 4), causal=False, rows=13)
    assert segments.calls == ((3, 4),)
    assert segments.into is None
    assert segments.back is None


def test_causal_segments_of_like_length_share_a_call() -> None:
    """Causal attention batches segments within a quarter of the longest; full attention only equal ones."""
    lengths = (100, 80, 70, 100, 30, 5)
    assert _buckets(lengths, causal=True) == [[0, 1, 3], [2], [4, 5]]
    assert _buckets(lengths, causal=False) == [[0, 3], [1], [2], [4], [5]]


@given(lengths=st.lists(st.integers(0, 60), max_size=30), causal=st.booleans())
def test_every_segment_with_rows_is_in_one_bucket(lengths: list[int], causal: bool) -> None:
    """No segment is lost or taken twice, and empty ones cost no call."""
    found = [segment for bucket in _buckets(lengths, causal=causal) for segment in bucket]
    assert sorted(found) == [segment for segment, length in enumerate(lengths) if length]


def test_rows_must_hold_the_segments() -> None:
    """More rows of segments than rows is our own mistake."""
    with pytest.raises(AssertionError, match="7 rows of segments in 6"):
        Segments.of((3, 4), causal=True, rows=6)
