"""Fills tensors with boxes of the pieces of one shard, reading the blocks that hold some of them.

Where a box is one range of the file and the target one range of host memory, what is read goes right there and is
checked there; a damaged block is zeroed, so that no wrong number stays. All else is copied from the reader's slab.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from torch.autograd.graph import increment_version

from mimo.checkpoint._boxes import Box, boxes_between, intersect
from mimo.checkpoint._manifest import Piece
from mimo.checkpoint._reader import ShardReader
from mimo.checkpoint._tensors import view_bytes


@attrs.frozen(kw_only=True)
class Read:
    """A box of a tensor that lies in ``piece``, and the ``target`` of its shape and dtype to be filled with it."""

    piece: Piece
    box: Box
    target: torch.Tensor


def read_boxes(reader: ShardReader, reads: Iterable[Read]) -> None:
    """Fill targets from the reader's shard; best in the order of the file.

    Raises:
        CheckpointError: a block that holds some of a box is damaged; names file and block.
    """
    parts: dict[int, list[tuple[int, memoryview]]] = {}  # of each block, what is read right to its place
    for read in reads:
        if not read.box.elements:
            continue
        begin, end = _span(read)
        if end - begin == read.box.elements * read.target.element_size() and _is_plain(read.target):
            increment_version(read.target)
            target = view_bytes(read.target)
            for index in reader.blocks(begin, end):
                low, high = reader.span(index)
                first, last = max(low, begin), min(high, end)
                parts.setdefault(index, []).append((first, target[first - begin : last - begin]))
        else:
            _read_parts(reader, parts)
            for index in reader.blocks(begin, end):
                _copy_block(reader, index, read)
    _read_parts(reader, parts)


def _read_parts(reader: ShardReader, parts: dict[int, list[tuple[int, memoryview]]]) -> None:
    for index, found in parts.items():
        reader.read_into(index, found)
    parts.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its bytes in host memory are those of a file."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()


def _span(read: Read) -> tuple[int, int]:
    """Return where in the file the box begins and ends."""
    last = [low + size - 1 for low, size in zip(read.box.offset, read.box.shape, strict=True)]
    first, end = read.piece.box.find(read.box.offset), read.piece.box.find(last) + 1
    each = read.target.element_size()
    return read.piece.begin + first * each, read.piece.begin + end * each


def _copy_block(reader: ShardReader, index: int, read: Read) -> None:
    """Copy what a block holds of a box."""
    piece, target, each = read.piece, read.target, read.target.element_size()
    low, high = reader.span(index)
    begin, end = max(low, piece.begin), min(high, piece.end)
    first = (begin - piece.begin) // each
    held = boxes_between(piece.box, first, (end - piece.begin) // each)
    parts = [part for one in held if (part := intersect(one, read.box)) is not None]
    if not parts:  # rows longer than a block, of which this block holds other columns
        return
    data = torch.frombuffer(reader.read(index)[begin - low : end - low], dtype=target.dtype)
    for part in parts:
        source = data.as_strided(part.shape, piece.box.strides, piece.box.find(part.offset) - first)
        target[part.slices(read.box)].copy_(source)
