"""Fills a tensor with a box of a piece, block by block, reading the blocks that hold some of it.

Where the box is one range of the file and the target one range of host memory, whole blocks are read to their place and
checked there; a damaged one is zeroed, so that no wrong number stays. All else goes through the reader's slab, which is
small enough for the cache.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from mimo.checkpoint._boxes import Box, boxes_between, intersect
from mimo.checkpoint._manifest import Piece
from mimo.checkpoint._reader import ShardReader
from mimo.checkpoint._tensors import view_bytes


def read_box(reader: ShardReader, piece: Piece, box: Box, target: torch.Tensor) -> None:
    """Fill ``target``, of the shape and dtype of ``box``, with that box of the tensor, which lies in ``piece``.

    Raises:
        CheckpointError: a block that holds some of it is damaged; names file and block.
    """
    if not box.elements:
        return
    last = [low + size - 1 for low, size in zip(box.offset, box.shape, strict=True)]
    first, end = piece.box.find(box.offset), piece.box.find(last) + 1
    begin, end = (piece.begin + at * target.element_size() for at in (first, end))
    if end - begin == box.elements * target.element_size() and _is_plain(target):
        _read_range(reader, begin, view_bytes(target))
        increment_version(target)
    else:
        for index in reader.blocks(begin, end):
            _copy_block(reader, index, piece, box, target)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether its bytes in host memory are those of a file."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()


def _read_range(reader: ShardReader, begin: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of the file from ``begin`` on."""
    for index in reader.blocks(begin, begin + len(target)):
        low, high = reader.span(index)
        first, last = max(low, begin), min(high, begin + len(target))
        part = target[first - begin : last - begin]
        if last - first == high - low:
            reader.read_into(index, part)
        else:
            part[:] = reader.read(index)[first - low : last - low]


def _copy_block(reader: ShardReader, index: int, piece: Piece, box: Box, target: torch.Tensor) -> None:
    """Copy what a block holds of ``box`` to ``target``."""
    low, high = reader.span(index)
    begin, end = max(low, piece.begin), min(high, piece.end)
    first = (begin - piece.begin) // target.element_size()
    held = boxes_between(piece.box, first, (end - piece.begin) // target.element_size())
    parts = [part for one in held if (part := intersect(one, box)) is not None]
    if not parts:  # rows longer than a block, of which this block holds other columns
        return
    data = torch.frombuffer(reader.read(index)[begin - low : end - low], dtype=target.dtype)
    for part in parts:
        source = data.as_strided(part.shape, piece.box.strides, piece.box.find(part.offset) - first)
        target[part.slices(box)].copy_(source)
