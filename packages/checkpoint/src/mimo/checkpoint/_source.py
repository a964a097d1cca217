"""A checkpoint that one process reads as a stream: any tensor, however it is cut, with little of it in memory."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

from mimo.checkpoint._boxes import Box, boxes_between, intersect
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._read_box import Read, read_boxes
from mimo.checkpoint._reader import ShardReader, make_slab
from mimo.checkpoint._tensors import DTYPES

CHUNK_BYTES = 4 << 20
_MOST_OPEN = 16  # if the pieces of a tensor lie in more files, some are opened repeatedly


class Source:
    """A committed checkpoint; all that it returns is verified. A ``with`` block closes its files.

    Raises:
        CheckpointError: the manifest is missing or damaged; while reading, a file or block is damaged.
    """

    def __init__(self, step_folder: Path) -> None:
        self.manifest = read_manifest(step_folder)
        self._folder = step_folder
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()  # the last used one is at the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.ExitStack() as stack:
            for reader in self._readers.values():
                stack.callback(reader.close)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def elements(self, name: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor from ``begin`` to ``end``, as `chunks` does."""
        shape = self.manifest.tensors[name].shape
        return self.chunks(name, Box(tuple(0 for _ in shape), shape), begin, end)

    def chunks(self, name: str, box: Box, begin: int = 0, end: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements of a box of a tensor, the last dim fastest, as 1-d tensors of some MiB.

        All share one buffer: each is valid until the next one is taken.

        Args:
            name: of the tensor.
            box: which part of the tensor is read.
            begin: index of the first element within the box.
            end: index after the last one; None for all.
        """
        dtype = DTYPES[self.manifest.tensors[name].dtype]
        most = CHUNK_BYTES // dtype.itemsize
        end = box.elements if end is None else end
        buffer = torch.empty(min(most, end - begin), dtype=dtype)
        for low in range(begin, end, most):
            chunk = buffer[: end - low]
            for part in boxes_between(box, low, low + len(chunk)):
                at = box.find(part.offset) - low
                self._fill(name, part, chunk[at : at + part.elements].view(part.shape))
            yield chunk

    def _fill(self, name: str, box: Box, target: torch.Tensor) -> None:
        for piece in self.manifest.tensors[name].pieces:
            if (common := intersect(box, piece.box)) is not None:
                read_boxes(self._open(piece.shard), [Read(piece=piece, box=common, target=target[common.slices(box)])])

    def _open(self, shard: str) -> ShardReader:
        if shard not in self._readers:
            if len(self._readers) == _MOST_OPEN:
                self._readers.popitem(last=False)[1].close()
            slab = make_slab(self.manifest.block_bytes)
            self._readers[shard] = ShardReader(self._folder / shard, self.manifest.shards[shard], slab)
        self._readers.move_to_end(shard)
        return self._readers[shard]
