"""Reads one shard block by block; nothing of a block is used before its checksum was compared.

A block that is wanted whole is read right to its places, which may be several; else to a slab that is used again and
again, and copied from there.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mimo.checkpoint._blocks import checksum, checksum_parts
from mimo.checkpoint._manifest import ShardEntry
from mimo.hooks import CheckpointError

_FIX = "The file is damaged: load another checkpoint."
_MOST_PARTS = 1024  # of one read (`IOV_MAX`)


def make_slab(block_bytes: int) -> memoryview:
    """Return memory for one block, which readers may use one after another."""
    return memoryview(mmap.mmap(-1, block_bytes))


class ShardReader:
    """An open shard whose size and header were compared with its manifest's entry.

    Args:
        path: the file.
        entry: what the manifest says of it.
        slab: of `make_slab`, with the manifest's ``block_bytes``; no other reader uses it while this one does.
        on_progress: called for each block that was read.

    Raises:
        CheckpointError: the file is missing, no regular file, or of another size or header; names the file.
    """

    def __init__(
        self, path: Path, entry: ShardEntry, slab: memoryview, *, on_progress: Callable[[], None] | None = None
    ) -> None:
        self._path = path
        self._entry = entry
        self._slab = slab
        self._on_progress = on_progress or (lambda: None)
        self._kept = -1  # the block in the slab: many small tensors share one
        try:
            # A link could lead out of the folder, a pipe would wait for ever.
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                str(path), expected="a shard of the checkpoint", got=f"{type(error).__name__}: {error.strerror}"
            ) from error
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def blocks(self, begin: int, end: int) -> range:
        """Return the numbers of the blocks that hold bytes ``begin`` to ``end`` of the file, which lie in its data."""
        start, each = self._entry.header_bytes, len(self._slab)
        return range((begin - start) // each, -(-(end - start) // each) if begin < end else 0)

    def span(self, index: int) -> tuple[int, int]:
        """Return where a block begins and ends in the file."""
        low = self._entry.header_bytes + index * len(self._slab)
        return low, min(low + len(self._slab), self._entry.bytes)

    def read(self, index: int) -> memoryview:
        """Return a block, verified; it is good until the next one is read.

        Raises:
            CheckpointError: it is damaged; names file and block.
        """
        low, high = self.span(index)
        found = self._slab[: high - low]
        if self._kept != index:
            self._kept = -1
            self._read_checked(index, [found])
            self._kept = index
        return found

    def read_into(self, index: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Read a block to where it is needed; where it is damaged, zeros or the old bytes are left there.

        Args:
            index: of the block.
            parts: where in the file each begins, in this order; each lies in the block.

        Raises:
            CheckpointError: it is damaged; names file and block.
        """
        low, high = self.span(index)
        views = [view for _, view in parts]
        if index == self._kept or len(views) > _MOST_PARTS or not _fit(parts, low, high):
            data = self.read(index)
            for begin, view in parts:
                view[:] = data[begin - low : begin - low + len(view)]
            return
        try:
            self._read_checked(index, views)
        except BaseException:
            for view in views:
                view[:] = bytes(len(view))
            raise

    def header(self) -> bytes:
        """Return the header, length field included, verified.

        Raises:
            CheckpointError: it is damaged; names the file.
        """
        self._kept = -1
        found = b"".join(bytes(part) for part in self._header())
        self._check_header(checksum(found))
        return found

    def _read_checked(self, index: int, parts: Sequence[memoryview]) -> None:
        self._fill(parts, self.span(index)[0])
        self._on_progress()
        got, expected = checksum(parts[0]) if len(parts) == 1 else checksum_parts(parts), self._entry.blocks[index]
        if got != expected:
            raise CheckpointError(f"{self._path} block {index}", expected=f"the checksum {expected}", got=got, fix=_FIX)

    def _fill(self, parts: Sequence[memoryview], begin: int) -> None:
        left = sum(map(len, parts))
        while left:
            count = os.preadv(self._file, parts, begin)
            if not count:
                raise CheckpointError(str(self._path), expected=f"{self._entry.bytes} bytes", got=f"{begin}", fix=_FIX)
            begin, left = begin + count, left - count
            parts = list(_after(parts, count)) if left else ()

    def _check(self) -> None:
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode):
            raise CheckpointError(str(self._path), expected="a regular file", got="something else")
        if state.st_size != self._entry.bytes:
            raise CheckpointError(
                str(self._path), expected=f"{self._entry.bytes} bytes", got=str(state.st_size), fix=_FIX
            )
        self._check_header(checksum_parts(self._header()))

    def _check_header(self, got: str) -> None:
        if got != self._entry.header_checksum:
            raise CheckpointError(
                f"{self._path} header", expected=f"the checksum {self._entry.header_checksum}", got=got, fix=_FIX
            )

    def _header(self) -> Iterator[memoryview]:
        for low in range(0, self._entry.header_bytes, len(self._slab)):
            part = self._slab[: min(len(self._slab), self._entry.header_bytes - low)]
            self._fill([part], low)
            yield part


def _fit(parts: Sequence[tuple[int, memoryview]], low: int, high: int) -> bool:
    """Return whether parts of a file are all of its bytes from ``low`` to ``high``, each once."""
    at = low
    for begin, view in parts:
        if begin != at:
            return False
        at += len(view)
    return at == high


def _after(parts: Iterable[memoryview], count: int) -> Iterator[memoryview]:
    """Yield what is left of parts without their first bytes."""
    for part in parts:
        if count < len(part):
            yield part[count:]
        count = max(0, count - len(part))
