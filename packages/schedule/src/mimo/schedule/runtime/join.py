"""Joins: how the rows that each rank of a group got become one tensor, on all of them. R rows, H columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule.routes import Span, count
from mimo.topology.collectives import all_gather_single

Parts = tuple[tuple[Span, ...], ...]
"""Rows of the tensor that each rank contributes."""


@attrs.frozen
class Join:
    """The buffer of a rank is the tensor itself: nothing is gathered.

    Args:
        own: rows of the tensor for which this rank's buffer has room.
        room: rows of the buffer; those after ``own`` only make all ranks' buffers equally long.

    Attributes:
        writes: whether the buffer is written to.
    """

    own: Span
    room: int
    writes: ClassVar[bool] = False

    def __call__(self, buffer: Tensor) -> Tensor:
        """Return the tensor [R, H]; collective over the group if there is one."""
        return buffer


@attrs.frozen
class SliceJoin(Join):
    """Each rank has one slice; one after the other they are the tensor, ``bounds[i] .. bounds[i + 1]`` of rank i."""

    bounds: Sequence[int]
    group: dist.ProcessGroup

    def __call__(self, buffer: Tensor) -> Tensor:
        """Gather the slices."""
        sizes = [stop - start for start, stop in pairwise(self.bounds)]
        joined = buffer.new_empty(len(sizes) * self.room, buffer.shape[1])
        all_gather_single(joined, buffer, self.group)
        if all(size == self.room for size in sizes):
            return joined
        return torch.cat([joined[rank * self.room :][:size] for rank, size in enumerate(sizes)])


@attrs.frozen
class SpanJoin(Join):
    """Each rank has some spans of the tensor; the rest is on all ranks."""

    parts: Parts
    group: dist.ProcessGroup
    writes: ClassVar[bool] = True

    def __call__(self, buffer: Tensor) -> Tensor:
        """Gather the spans, and put them into the buffer."""
        rank, sizes = self.group.rank(), [count(spans) for spans in self.parts]
        longest = max(sizes)
        block = buffer.new_empty(longest, buffer.shape[1])
        if sizes[rank]:
            block[: sizes[rank]] = pack(buffer, self.parts[rank])
        joined = buffer.new_empty(len(sizes) * longest, buffer.shape[1])
        all_gather_single(joined, block, self.group)
        for other, spans in enumerate(self.parts):
            if other != rank:
                unpack(joined[other * longest :][: sizes[other]], spans, buffer)
        return buffer


def join_of(parts: Parts, rows: int, group: dist.ProcessGroup | None) -> Join:
    """Return the join of a tensor of ``rows`` rows to which each rank of ``group`` contributes its part."""
    if not parts:
        return Join((0, rows), rows)
    assert group is not None
    bounds = [0, *accumulate(count(spans) for spans in parts)]
    if bounds[-1] == rows and all(spans in ((span,), ()) for spans, span in zip(parts, pairwise(bounds), strict=True)):
        rank = group.rank()
        room = max(stop - start for start, stop in pairwise(bounds))
        return SliceJoin((bounds[rank], bounds[rank + 1]), room, bounds, group)
    return SpanJoin((0, rows), rows, parts, group)


def pack(rows: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return spans of ``rows`` one after the other: a view if there is but one, the rows themselves if it has all."""
    if len(spans) == 1 and spans[0] == (0, rows.shape[0]):
        return rows
    parts = [rows[start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(packed: Tensor, spans: Sequence[Span], rows: Tensor) -> None:
    """Put packed spans back into ``rows``."""
    first = 0
    for start, stop in spans:
        rows[start:stop] = packed[first : first + stop - start]
        first += stop - start
