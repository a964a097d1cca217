"""Checksums: xxh3 of 64 bits for each block of a shard's data and for its header, of 128 bits for a manifest.

They find damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 1 << 20

Bytes = bytes | bytearray | memoryview


def checksum(data: Bytes) -> str:
    """Return the checksum of one block or header: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_parts(parts: Iterable[Bytes]) -> str:
    """Return the checksum of ``parts`` put together."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def digest(data: Bytes) -> str:
    """Return the digest of a manifest or a signature: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_parts(parts: Iterable[Bytes]) -> str:
    """Return the digest of ``parts`` put together."""
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.hexdigest()


class BlockHasher:
    """Checksums of data that arrives in pieces of any size, one for each block; the last block may be short."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._filled = 0
        self._current = xxhash.xxh3_64()
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        while len(data):
            part = data[: self._block_bytes - self._filled]
            self._current.update(part)
            self._filled += len(part)
            if self._filled == self._block_bytes:
                self._close_block()
            data = data[len(part) :]

    def finish(self) -> tuple[str, ...]:
        """Return all checksums; the hasher is used up."""
        if self._filled:
            self._close_block()
        return tuple(self._done)

    def _close_block(self) -> None:
        self._done.append(self._current.hexdigest())
        self._current.reset()
        self._filled = 0
