"""Converts tensors between our names and shapes and a published family's, a few MiB at a time.

A tensor whose dims lie in another order is held whole, and one that holds several of ours along a later dim an index of
its first dim at a time; of all others a chunk is.
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
        for index, name in enumerate(entry.names):
            part = entry.part_shape(entry.place(shapes[entry.ours], index)[1])
            if entry.along:
                yield from _taken(entry, name)
                continue
            begin = entry.rows[0] * math.prod(their_shapes[name][1:]) if entry.rows else 0
            found = _converted(theirs.elements(name, begin, begin + math.prod(part)), dtype, name)
            found = _finite(found, where(name), their_shapes[name], begin)
            yield from found if entry.dims is None else _turned(found, part, entry.dims)

    def _taken(entry: HfTensor, name: str) -> Iterator[Tensor]:
        """Yield what is ours of each index of their first dim."""
        assert entry.rows is not None
        low, high = entry.rows
        first, *rest = their_shapes[name]
        each = math.prod(rest)
        for index in range(first):
            found = _converted(theirs.elements(name, index * each, (index + 1) * each), dtype, name)
            block = _gathered(_finite(found, where(name), their_shapes[name], index * each), rest)
            mine = block.narrow(entry.along - 1, low, high - low)
            yield (mine if entry.dims is None else mine.permute([dim - 1 for dim in entry.dims[1:]])).reshape(-1)

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
    parts = _by_name(table)

    def chunks(name: str) -> Iterator[Tensor]:
        if parts[name][0][0].along:
            yield from _put_together([entry for entry, _ in parts[name]], their_shapes[name][0])
            return
        for entry, index in parts[name]:
            begin, shape = entry.place(shapes[entry.ours], index)
            path = f"{before}{entry.ours}"
            found = _converted(ours.elements(path, begin, begin + math.prod(shape)), dtype, path)
            if entry.dims is None:
                yield from found
            else:
                part = entry.part_shape(shape)
                turned = [part[dim] for dim in entry.dims]
                yield from _turned(found, turned, [entry.dims.index(dim) for dim in range(len(part))])

    def _put_together(entries: Sequence[HfTensor], count: int) -> Iterator[Tensor]:
        """Yield their tensor an index of its first dim at a time."""
        for index in range(count):
            yield torch.cat([_given(entry, index) for entry in entries], entries[0].along - 1).reshape(-1)

    def _given(entry: HfTensor, index: int) -> Tensor:
        shape = shapes[entry.ours][1:]
        each = math.prod(shape)
        path = f"{before}{entry.ours}"
        block = _gathered(_converted(ours.elements(path, index * each, (index + 1) * each), dtype, path), shape)
        dims = entry.dims or range(len(shape) + 1)
        return block.permute([dims.index(dim) - 1 for dim in range(1, len(shape) + 1)])

    return {name: Stream(dtype=dtype, shape=their_shapes[name], chunks=partial(chunks, name)) for name in parts}


def constant_streams(tensors: Mapping[str, Tensor]) -> dict[str, Stream]:
    """Return tensors that are written as they are, by name."""
    return {
        name: Stream(dtype=tensor.dtype, shape=tuple(tensor.shape), chunks=partial(_all_of, tensor))
        for name, tensor in tensors.items()
    }


def _all_of(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor.reshape(-1).contiguous()


def _by_name(table: Iterable[HfTensor]) -> dict[str, list[tuple[HfTensor, int]]]:
    """Return what makes up each of theirs, in order: entries, and which of their names it is."""
    parts: dict[str, list[tuple[HfTensor, int]]] = {}
    for entry in table:
        for index, name in enumerate(entry.names):
            parts.setdefault(name, []).append((entry, index))
    return {name: sorted(found, key=lambda part: part[0].rows or (0, 0)) for name, found in parts.items()}


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
    yield _gathered(chunks, shape).permute(*dims).reshape(-1)


def _gathered(chunks: Iterator[Tensor], shape: Sequence[int]) -> Tensor:
    """Return a tensor of ``shape`` of all its elements."""
    whole, filled = torch.empty(0), 0
    for chunk in chunks:
        whole = whole if filled else torch.empty(math.prod(shape), dtype=chunk.dtype)
        whole[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return whole.view(*shape)
