"""Exact attention within each segment of packed rows, in as few kernel calls as the lengths allow.

Segments of one length (causal: of about one length, padded at the end, where no row looks) become one batched call.
What depends on the lengths is worked out once for a microbatch, by `Segments.of`, and serves all layers.
Shapes: T rows, N query heads, K key-value heads, D head width, C segments and L rows of each in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

_LIKE = 0.75  # a causal segment joins a call whose longest segment it reaches this far towards …
_SHORT = 32  # … or one so short that another call would cost more than its padding


@attrs.frozen(kw_only=True, eq=False)
class Segments:
    """Where the segments of packed rows lie; make it with `Segments.of`.

    Args:
        causal: whether a row sees only itself and earlier rows of its segment.
        rows: rows in all, T, the padding at the end included.
        used: rows that belong to a segment.
        calls: for each kernel call, segments and rows of each, ``(C, L)``.
        into: [sum of C·L] packed row that each row of the calls reads; None when the order is the packed one.
        back: [used] row of the calls that holds each packed row; None likewise.
    """

    causal: bool
    rows: int
    used: int
    calls: tuple[tuple[int, int], ...]
    into: Tensor | None
    back: Tensor | None

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, causal: bool, rows: int | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Return the segments of these lengths, 0 included, one after the other.

        Args:
            lengths: rows of each segment.
            causal: whether a row sees only itself and earlier rows of its segment.
            rows: T, where padding at the end follows the last segment.
            device: where attention will run.
        """
        used = sum(lengths)
        total = used if rows is None else rows
        assert used <= total, f"{used} rows of segments in {total}"
        ends = torch.tensor(list(lengths), dtype=torch.long).cumsum(0)
        buckets = _buckets(lengths, causal=causal)
        calls = tuple((len(bucket), max(lengths[segment] for segment in bucket)) for bucket in buckets)
        in_order = len(buckets) <= 1 and sum(count * length for count, length in calls) == used
        if in_order:
            return cls(causal=causal, rows=total, used=used, calls=calls, into=None, back=None)
        pieces = []
        back = torch.empty(used, dtype=torch.long)
        offset = 0
        for bucket, (count, length) in zip(buckets, calls, strict=True):
            end = ends[bucket].unsqueeze(1)
            own = torch.tensor([lengths[segment] for segment in bucket]).unsqueeze(1)
            reads = (end - own) + torch.arange(length)
            back[reads[reads < end]] = (torch.arange(count * length).view(count, length) + offset)[reads < end]
            # Padding reads its segment's own last row: finite, seen by no row that is kept, so without gradient.
            pieces.append(torch.minimum(reads, end - 1).flatten())
            offset += count * length
        into = torch.cat(pieces).to(device)
        return cls(causal=causal, rows=total, used=used, calls=calls, into=into, back=back.to(device))


def _buckets(lengths: Sequence[int], *, causal: bool) -> list[list[int]]:
    """Return the segments of each call, ascending; segments without rows are in none."""
    buckets: list[list[int]] = []
    longest = 0
    for segment in sorted((s for s, length in enumerate(lengths) if length), key=lambda s: -lengths[s]):
        length = lengths[segment]
        like = length == longest or (causal and (length >= _LIKE * longest or longest <= _SHORT))
        if buckets and like:
            buckets[-1].append(segment)
        else:
            buckets.append([segment])
            longest = length
    return [sorted(bucket) for bucket in buckets]


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Return scaled dot-product attention [T, N, D] of each row to its own segment; padding at the end gets zeros.

    Args:
        query: [T, N, D].
        key: [T, K, D]; K divides N, and each key-value head serves N / K query heads in a row
            (Ainslie et al. 2023, arXiv:2305.13245).
        value: [T, K, D].
        segments: of these T rows.
    """
    assert query.shape[0] == segments.rows, f"{query.shape[0]} rows, segments of {segments.rows}"
    sizes = [count * length for count, length in segments.calls]
    grouped = key.shape[1] != query.shape[1]
    parts = [torch.split(_take(x, segments), sizes) for x in (query, key, value)]
    found = []
    for shape, *call in zip(segments.calls, *parts, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in call)  # [C, N or K, L, D]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=segments.causal, enable_gqa=grouped)
        found.append(out.transpose(1, 2).flatten(0, 1))
    attended = torch.cat(found) if len(found) > 1 else found[0] if found else query[:0]
    if segments.back is not None:
        attended = attended.index_select(0, segments.back)
    padding = segments.rows - segments.used
    return functional.pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended


def _take(x: Tensor, segments: Segments) -> Tensor:
    if segments.into is not None:
        return x.index_select(0, segments.into)
    return x[: segments.used].contiguous()
