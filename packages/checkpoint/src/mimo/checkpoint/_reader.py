"""Reads byte ranges of one shard; nothing leaves this file before the checksum of its block was compared."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from mimo.checkpoint._blocks import checksum
from mimo.checkpoint._manifest import ShardEntry
from mimo.hooks import CheckpointError

_FIX = "The file is damaged: load another checkpoint."


class ShardReader:
    """An open shard whose size and header were compared with its manifest's entry.

    Raises:
        CheckpointError: the file is missing, no regular file, or of another size or header; names the file.
    """

    def __init__(self, path: Path, entry: ShardEntry, block_bytes: int) -> None:
        self._path = path
        self._entry = entry
        self._block_bytes = block_bytes
        self._kept: tuple[int, memoryview] | None = None  # the last block read: many small tensors share one
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

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``begin`` to ``end`` of the file, which lie in its data, verified.

        Raises:
            CheckpointError: a block that holds some of them is damaged; names file and block.
        """
        if begin == end:
            return memoryview(b"")
        start = self._entry.header_bytes
        first, last = (begin - start) // self._block_bytes, (end - 1 - start) // self._block_bytes
        if self._kept is None or not first == last == self._kept[0]:
            found = self._read_blocks(first, last)
            self._kept = (last, found[(last - first) * self._block_bytes :])
        else:
            found = self._kept[1]
        skipped = start + first * self._block_bytes
        return found[begin - skipped : end - skipped]

    def check_block(self, index: int) -> None:
        """Read and verify one block.

        Raises:
            CheckpointError: it is damaged; names file and block.
        """
        self._read_blocks(index, index)

    def _read_blocks(self, first: int, last: int) -> memoryview:
        begin = self._entry.header_bytes + first * self._block_bytes
        end = min(self._entry.header_bytes + (last + 1) * self._block_bytes, self._entry.bytes)
        data = self._read_raw(begin, end)
        for index in range(first, last + 1):
            low = (index - first) * self._block_bytes
            got, expected = checksum(data[low : low + self._block_bytes]), self._entry.blocks[index]
            if got != expected:
                raise CheckpointError(
                    f"{self._path} block {index}", expected=f"the checksum {expected}", got=got, fix=_FIX
                )
        return data

    def _read_raw(self, begin: int, end: int) -> memoryview:
        data = memoryview(bytearray(end - begin))
        filled = 0
        while filled < len(data):
            count = os.preadv(self._file, [data[filled:]], begin + filled)
            if not count:
                raise CheckpointError(
                    str(self._path), expected=f"{self._entry.bytes} bytes", got=f"{begin + filled}", fix=_FIX
                )
            filled += count
        return data

    def _check(self) -> None:
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode):
            raise CheckpointError(str(self._path), expected="a regular file", got="something else")
        if state.st_size != self._entry.bytes:
            raise CheckpointError(
                str(self._path), expected=f"{self._entry.bytes} bytes", got=str(state.st_size), fix=_FIX
            )
        header = self._read_raw(0, self._entry.header_bytes)
        if (got := checksum(header)) != self._entry.header_checksum:
            raise CheckpointError(
                f"{self._path} header", expected=f"the checksum {self._entry.header_checksum}", got=got, fix=_FIX
            )
