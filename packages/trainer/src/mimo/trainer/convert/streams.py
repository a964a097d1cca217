"""Converts tensors between our names and shapes and a published family's, a few MiB at a time.

A tensor whose dims lie in another order is held whole; of all others a chunk is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mimo.checkpoint import Stream
from mimo.hooks import CheckpointError
from mimo.model import HfTensor


class Elements(Protocol):
    """Where tensors are read."""

    def elements(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield a tensor's elements from ``begin`` to ``end``, the last dim fastest, as 1-d tensors."""


def our_streams(
    table: Iterable[HfTensor],
    shapes: Mapping[str, tuple[int, ...]],
    theirs: Elements,
    their_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    where: Callable[[str], str] = str,
) -> dict[str, Stream]:
    """Return our tensors by path; elements that are not finite are refused when they are read.

    Args:
        table: with the names of the folder.
        shapes: ours, by path.
        theirs: the folder.
        their_shapes: by name there.
        dtype: to convert to.
        where: of a name there, what errors call it.
    """

    def chunks(entry: HfTensor) -> Iterator[Tensor]:
        shape = shapes[entry.ours]
        part = entry.part_shape(shape[1:] if entry.stacked else shape)
        for name in entry.names:
            begin = entry.rows[0] * math.prod(their_shapes[name][1:]) if entry.rows else 0
            found = _converted(theirs.elements(name, begin, begin + math.prod(part)), dtype, name)
            found = _finite(found, where(name), their_shapes[name], begin)
            yield from found if entry.dims is None else _turned(found, part, entry.dims)

    return {entry.ours: Stream(dtype=dtype, shape=shapes[entry.ours], chunks=partial(chunks, entry)) for entry in table}


def their_streams(
    table: Iterable[HfTensor],
    shapes: Mapping[str, tuple[int, ...]],
    ours: Elements,
    their_shapes: Mapping[str, tuple[int, ...]],
    *,
    before: str,
    dtype: torch.dtype,
) -> dict[str, Stream]:
    """Return the tensors of a folder by name.

    Args:
        table: with the names of the folder.
        shapes: ours, by path.
        ours: the checkpoint.
        their_shapes: by name there.
        before: what our names begin with in the checkpoint, beside their paths.
        dtype: to convert to.
    """
    parts: dict[str, list[tuple[int, HfTensor, int]]] = {}
    for entry in table:
        for index, name in enumerate(entry.names):
            parts.setdefault(name, []).append((entry.rows[0] if entry.rows else 0, entry, index))

    def chunks(name: str) -> Iterator[Tensor]:
        for _, entry, index in sorted(parts[name], key=lambda part: part[0]):
            shape = shapes[entry.ours][1:] if entry.stacked else shapes[entry.ours]
            each = math.prod(shape)
            path = f"{before}{entry.ours}"
            found = _converted(ours.elements(path, index * each, (index + 1) * each), dtype, path)
            if entry.dims is None:
                yield from found
            else:
                part = entry.part_shape(shape)
                turned = [part[dim] for dim in entry.dims]
                yield from _turned(found, turned, [entry.dims.index(dim) for dim in range(len(part))])

    return {name: Stream(dtype=dtype, shape=their_shapes[name], chunks=partial(chunks, name)) for name in parts}


def _converted(chunks: Iterable[Tensor], dtype: torch.dtype, name: str) -> Iterator[Tensor]:
    for chunk in chunks:
        found = chunk.to(dtype)
        if torch.finfo(dtype).max < torch.finfo(chunk.dtype).max and (found.isinf() & chunk.isfinite()).any():
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                name,
                expected=f"numbers that {kind} can hold, up to {torch.finfo(dtype).max:g}",
                got=f"{float(chunk[chunk.isfinite()].abs().max()):g}",
                fix="Choose a type of a wider range.",
            )
        yield found


def _finite(chunks: Iterable[Tensor], where: str, shape: tuple[int, ...], begin: int) -> Iterator[Tensor]:
    """Yield the elements of a tensor of ``shape`` from ``begin`` on, which must be finite numbers."""
    for chunk in chunks:
        if not chunk.isfinite().all():
            first = int(torch.nonzero(~chunk.isfinite())[0])
            index = [int(at) for at in torch.unravel_index(torch.tensor(begin + first), shape)] if shape else []
            raise CheckpointError(
                where,
                expected="finite numbers",
                got=f"{float(chunk[first])} at {index}",
                fix="The weights are damaged, or were so when they were published: fetch them again.",
            )
        begin += len(chunk)
        yield chunk


def _turned(chunks: Iterator[Tensor], shape: Sequence[int], dims: Sequence[int]) -> Iterator[Tensor]:
    """Yield all elements at once, of a tensor of ``shape`` whose dims are put into the order ``dims``."""
    whole, filled = torch.empty(0), 0
    for chunk in chunks:
        whole = whole if filled else torch.empty(math.prod(shape), dtype=chunk.dtype)
        whole[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    yield whole.view(*shape).permute(*dims).reshape(-1)
