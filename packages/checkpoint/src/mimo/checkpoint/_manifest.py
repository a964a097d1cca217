"""The manifest: what a checkpoint holds and where each piece of it lies, as values that know nothing of files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.checkpoint import _json
from mimo.checkpoint._blocks import digest
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._wire import Wire


@attrs.frozen(kw_only=True)
class Piece:
    """A box of a tensor in a shard, under the tensor's own name; ``begin`` and ``end`` count bytes of the file."""

    shard: str
    box: Box
    begin: int
    end: int


@attrs.frozen(kw_only=True)
class TensorEntry:
    """A tensor: dtype code of safetensors, global shape, and the pieces that make it up; an empty one has none."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@attrs.frozen(kw_only=True)
class ShardEntry:
    """A safetensors file: its size, its header's (length field included) and the checksums of both parts."""

    bytes: int
    header_bytes: int
    header_checksum: str
    blocks: tuple[str, ...]


def _unpack_shards(packed: Mapping[str, Mapping[str, Any]]) -> dict[str, ShardEntry]:
    return {name: ShardEntry(**{**fields, "blocks": tuple(fields["blocks"])}) for name, fields in packed.items()}


SHARD_ENTRIES: Wire[dict[str, ShardEntry]] = Wire(
    lambda shards: {name: attrs.asdict(entry) for name, entry in shards.items()}, _unpack_shards
)
"""By file name."""


@attrs.frozen(kw_only=True)
class OwnedEntry:
    """A JSON value that only one module's ranks know."""

    module: str
    value: Any


@attrs.frozen(kw_only=True)
class Manifest:
    """What one checkpoint holds.

    Args:
        step: the training step after which it was saved.
        block_bytes: length of the blocks of shard data that have a checksum each.
        tensors: by flat name.
        shards: by file name.
        common: JSON values that are equal on all ranks, by flat name.
        owned: JSON values of one module each, by flat name.
        topology: the grids of the run that saved, as plain data.
        config: the resolved config of the run that saved, as plain data.
    """

    step: int
    block_bytes: int
    tensors: Mapping[str, TensorEntry]
    shards: Mapping[str, ShardEntry]
    common: Mapping[str, Any]
    owned: Mapping[str, OwnedEntry]
    topology: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        """The flat names of all entries."""
        return frozenset({*self.tensors, *self.common, *self.owned})

    @property
    def identity(self) -> str:
        """Digest of step, structure and checksums: equal if two ranks read the same checkpoint."""
        shards = {name: [entry.header_checksum, *entry.blocks] for name, entry in self.shards.items()}
        return digest(_json.write([self.step, self.structure, shards]).encode())

    @property
    def structure(self) -> str:
        """Signature of names, dtypes, shapes, pieces and owners: equal where only the numbers differ."""
        tensors = {
            name: [entry.dtype, entry.shape, sorted([piece.box.offset, piece.box.shape] for piece in entry.pieces)]
            for name, entry in self.tensors.items()
        }
        owners = {name: entry.module for name, entry in self.owned.items()}
        return digest(_json.write([tensors, sorted(self.common), owners]).encode())
