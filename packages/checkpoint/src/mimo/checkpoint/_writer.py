"""Writes one rank's shards: plain safetensors files, streamed once, their checksums taken on the way.

The safetensors library would need a copy of all bytes or a second read for the checksums; the header is simple enough.
What lies where follows from names, shapes and dtypes alone, so it is worked out before any data is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from mimo.checkpoint._blocks import BlockHasher, checksum
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Piece, ShardEntry
from mimo.checkpoint._tensors import CODES, DTYPES, view_bytes
from mimo.checkpoint._wire import Wire

SHARD_BYTES = 2 << 30

_WRITE_BUFFER_BYTES = 1 << 20
_HASHED_BYTES = 4 << 20  # written while they are still in the cache
_ALIGNED_BYTES = 64  # processors copy between a file and memory up to three times slower where one is shifted by less


@attrs.frozen(kw_only=True)
class Cut:
    """A piece that a rank is to write: a box of tensor ``name``."""

    name: str
    box: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.box.elements * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class Slot:
    """Where a shard holds a piece: ``begin`` and ``end`` count bytes of its data, after the header."""

    cut: Cut
    begin: int
    end: int


@attrs.frozen(kw_only=True)
class Layout:
    """A shard before it is written: file name, header, and which piece lies where, without a gap."""

    shard: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def data_bytes(self) -> int:
        """Size of the file without its header."""
        return self.slots[-1].end

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield tensor names and pieces as in a manifest."""
        start = len(self.header)
        for slot in self.slots:
            yield (
                slot.cut.name,
                Piece(shard=self.shard, box=slot.cut.box, begin=start + slot.begin, end=start + slot.end),
            )


def _pack_layouts(layouts: tuple[Layout, ...]) -> list[Any]:
    return [
        [layout.shard, [[cut.name, *attrs.astuple(cut.box), CODES[cut.dtype]] for cut in _cuts(layout)]]
        for layout in layouts
    ]


def _unpack_layouts(packed: list[Any]) -> tuple[Layout, ...]:
    return tuple(
        _lay_out_shard(
            shard,
            [
                Cut(name=name, box=Box(tuple(offset), tuple(shape)), dtype=DTYPES[code])
                for name, offset, shape, code in cuts
            ],
        )
        for shard, cuts in packed
    )


def _cuts(layout: Layout) -> list[Cut]:
    return [slot.cut for slot in layout.slots]


LAYOUTS = Wire(_pack_layouts, _unpack_layouts)
"""Of a layout travel the pieces: where each lies, and the header, follow from them."""


def lay_out(rank: int, cuts: Sequence[Cut], *, shard_bytes: int = SHARD_BYTES) -> tuple[Layout, ...]:
    """Return the shards into which a rank's pieces go.

    Empty pieces are left out. A file ends before it would exceed ``shard_bytes``; a larger piece has its own.

    Args:
        rank: for the file names.
        cuts: at most one for each tensor name.
        shard_bytes: size above which a new file is begun, in bytes of data.
    """
    return tuple(
        _lay_out_shard(f"rank_{rank:05d}_{index:04d}.safetensors", group)
        for index, group in enumerate(_group(cuts, shard_bytes))
    )


def write_layouts(
    folder: Path,
    layouts: Iterable[Layout],
    data: Callable[[Layout], Iterable[memoryview]],
    *,
    on_progress: Callable[[], None] | None = None,
) -> dict[str, ShardEntry]:
    """Write shards into ``folder`` and sync them.

    Args:
        folder: an existing folder without files of these names.
        layouts: the shards.
        data: gives a shard's bytes after its header, in order; each view is used before the next is asked for.
        on_progress: called each few MiB, and when a shard is synced.
    """
    on_progress = on_progress or (lambda: None)
    shards = {
        layout.shard: _write_shard(folder / layout.shard, layout, data(layout), on_progress) for layout in layouts
    }
    sync_folder(folder)
    return shards


def data_of(layout: Layout, fetch: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a shard's pieces, each fetched by the name of its tensor only when it is written."""
    for slot in layout.slots:
        tensor = fetch(slot.cut.name).detach().cpu().resolve_neg().contiguous()
        assert tuple(tensor.shape) == slot.cut.box.shape, (slot.cut, tensor.shape)
        assert tensor.dtype == slot.cut.dtype, (slot.cut, tensor.dtype)
        yield view_bytes(tensor)


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _group(cuts: Sequence[Cut], shard_bytes: int) -> Iterator[list[Cut]]:
    # What keeps the next one aligned comes first, then wide dtypes, as the library does it, so that every tensor begins
    # at a multiple of its item size.
    group: list[Cut] = []
    filled = 0
    for cut in sorted(cuts, key=lambda cut: (cut.bytes % _ALIGNED_BYTES > 0, -cut.dtype.itemsize, cut.name)):
        if not cut.bytes:
            continue
        if group and filled + cut.bytes > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(cut)
        filled += cut.bytes
    if group:
        yield group


def _lay_out_shard(shard: str, cuts: Sequence[Cut]) -> Layout:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    slots = []
    filled = 0
    for cut in cuts:
        slots.append(Slot(cut=cut, begin=filled, end=filled + cut.bytes))
        header[cut.name] = {
            "dtype": CODES[cut.dtype],
            "shape": cut.box.shape,
            "data_offsets": [filled, filled + cut.bytes],
        }
        filled += cut.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED_BYTES)
    return Layout(shard=shard, header=len(text).to_bytes(8, "little") + text, slots=tuple(slots))


def _write_shard(path: Path, layout: Layout, data: Iterable[memoryview], on_progress: Callable[[], None]) -> ShardEntry:
    hasher = BlockHasher()
    written = len(layout.header)
    with path.open("xb", buffering=_WRITE_BUFFER_BYTES) as file:
        file.write(layout.header)
        for view in data:
            for begin in range(0, len(view), _HASHED_BYTES):
                part = view[begin : begin + _HASHED_BYTES]
                hasher.update(part)
                file.write(part)
                on_progress()
            written += len(view)
        file.flush()
        os.fsync(file.fileno())
    on_progress()
    assert written == len(layout.header) + layout.data_bytes, (path, written)
    return ShardEntry(
        bytes=written,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        blocks=hasher.finish(),
    )
