"""Writes one rank's shards: plain safetensors files, streamed once, their checksums taken on the way.

The safetensors library would need a copy of all bytes or a second read for the checksums; the header is simple enough.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from mimo.checkpoint._blocks import BlockHasher, checksum
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Piece, ShardEntry
from mimo.checkpoint._tensors import CODES, view_bytes

SHARD_BYTES = 2 << 30

_WRITE_BUFFER_BYTES = 1 << 20


@attrs.frozen(kw_only=True)
class Part:
    """A piece that is still to be written: the box of tensor ``name`` that ``fetch`` returns."""

    name: str
    box: Box
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.box.elements * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class Written:
    """What one rank has written: its shards, and its pieces by tensor name."""

    shards: dict[str, ShardEntry]
    pieces: list[tuple[str, Piece]]


def write_shards(folder: Path, rank: int, parts: Sequence[Part], *, shard_bytes: int = SHARD_BYTES) -> Written:
    """Write ``parts`` into safetensors files of ``folder`` and sync them.

    Empty parts are left out. A file is closed before it would exceed ``shard_bytes``; a larger part has its own.

    Args:
        folder: an existing folder without files of this rank.
        rank: this rank, for the file names.
        parts: at most one for each tensor name.
        shard_bytes: size above which a new file is begun, in bytes of data.
    """
    shards: dict[str, ShardEntry] = {}
    pieces: list[tuple[str, Piece]] = []
    for index, group in enumerate(_group(parts, shard_bytes)):
        name = f"rank_{rank:05d}_{index:04d}.safetensors"
        shards[name], found = _write_shard(folder / name, group)
        pieces += found
    sync_folder(folder)
    return Written(shards=shards, pieces=pieces)


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _group(parts: Sequence[Part], shard_bytes: int) -> Iterator[list[Part]]:
    # Wide dtypes first, as the library does it, so that every tensor begins at a multiple of its item size.
    group: list[Part] = []
    filled = 0
    for part in sorted(parts, key=lambda part: (-part.dtype.itemsize, part.name)):
        if not part.bytes:
            continue
        if group and filled + part.bytes > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(part)
        filled += part.bytes
    if group:
        yield group


def _write_shard(path: Path, parts: Sequence[Part]) -> tuple[ShardEntry, list[tuple[str, Piece]]]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    filled = 0
    for part in parts:
        span = [filled, filled + part.bytes]
        header[part.name] = {"dtype": CODES[part.dtype], "shape": part.box.shape, "data_offsets": span}
        filled = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    hasher = BlockHasher()
    pieces: list[tuple[str, Piece]] = []
    position = len(head)
    with path.open("xb", buffering=_WRITE_BUFFER_BYTES) as file:
        file.write(head)
        for part in parts:
            tensor = part.fetch().detach().cpu().resolve_neg().contiguous()
            assert tuple(tensor.shape) == part.box.shape, (part.name, tensor.shape, part.box)
            assert tensor.dtype == part.dtype, (part.name, tensor.dtype, part.dtype)
            data = view_bytes(tensor)
            file.write(data)
            hasher.update(data)
            pieces.append((part.name, Piece(shard=path.name, box=part.box, begin=position, end=position + part.bytes)))
            position += part.bytes
        file.flush()
        os.fsync(file.fileno())
    entry = ShardEntry(bytes=position, header_bytes=len(head), header_checksum=checksum(head), blocks=hasher.finish())
    return entry, pieces
