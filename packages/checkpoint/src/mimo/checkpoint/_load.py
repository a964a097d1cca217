"""Loading: PyTorch's planner says which boxes of the saved pieces this rank needs; only their bytes are read.

Two object collectives: everything that does not fit, before anything is changed, and whether reading went well. The
planner's own global step changes nothing and is left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from mimo.checkpoint._manifest import Manifest, Piece, TensorEntry
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._reader import ShardReader
from mimo.checkpoint._tensors import CODES, DTYPES
from mimo.checkpoint._tree import fill, flatten
from mimo.hooks import CheckpointError, Common, Owned, StateTree

_SLAB_BYTES = 32 << 20  # what is held beside the tensors themselves while loading


@attrs.frozen(kw_only=True)
class _Request:
    """What one rank asks of a checkpoint: the names, and what it can't be given, by name."""

    identity: str
    names: frozenset[str]
    misfits: Mapping[str, str]


@attrs.frozen(kw_only=True)
class _Ready:
    """What one rank has found out before it changes a tensor; ``reads`` in the order of the files."""

    manifest: Manifest
    planner: DefaultLoadPlanner
    reads: list[tuple[Piece, ReadItem]]
    request: _Request


def load(step_folder: Path, tree: StateTree, *, strict: bool = False) -> StateTree:
    """Fill ``tree`` from a checkpoint; collective over the default process group.

    Tensors and DTensors are filled in place, whatever their placements and those at saving; only the needed byte
    ranges are read, and their blocks verified. Every rank of the group calls it, each with the entries it holds.

    Args:
        step_folder: a committed checkpoint.
        tree: the entries asked for; the values of its JSON leaves don't matter.
        strict: refuse entries of the checkpoint that no rank asks for, instead of leaving them.

    Returns:
        Nested dicts like ``tree``: the same tensors, and `Common` and `Owned` leaves with the values saved.

    Raises:
        CheckpointError: on every rank. Where entries are missing or misshapen, all are listed; then, or where a file is
            missing or cut short, nothing was changed. Where a block is damaged, tensors may be half filled and must
            be loaded from another checkpoint.
    """
    ranks, folder, where = Ranks.current(), Path(step_folder), str(step_folder)

    prepared = ranks.attempt(lambda: _prepare(folder, tree), where=where)
    requests = take_all(ranks.gather_everywhere(prepared if isinstance(prepared, Failure) else prepared.request))
    ready = take(prepared)
    _check_requests(requests, ready.manifest, where, strict=strict)

    outcome = ranks.attempt(lambda: _read(folder, ready), where=where)
    take_all(ranks.gather_everywhere(outcome))
    values = {**ready.manifest.common, **{name: entry.value for name, entry in ready.manifest.owned.items()}}
    return fill(tree, values)


def _prepare(folder: Path, tree: StateTree) -> _Ready:
    """Do all that can fail before a tensor is touched."""
    manifest, flat = read_manifest(folder), flatten(tree)
    found = {name: _compare_tensor(manifest, name, tensor) for name, tensor in flat.tensors.items()}
    found |= {name: _compare_value(manifest, name, leaf) for name, leaf in flat.values.items()}
    request = _Request(
        identity=manifest.identity,
        names=frozenset(found),
        misfits={name: text for name, text in found.items() if text},
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reads: list[tuple[Piece, ReadItem]] = []
    if not request.misfits:
        planner.set_up_planner(
            dict(flat.tensors), Metadata({name: _describe(manifest.tensors[name]) for name in flat.tensors})
        )
        items = planner.finish_plan(planner.create_local_plan()).items
        reads = [(_find_piece(manifest, item.storage_index), item) for item in items]
        reads.sort(key=lambda read: (read[0].shard, read[0].begin))
        for name in sorted({piece.shard for piece, _ in reads}):
            ShardReader(folder / name, manifest.shards[name], manifest.block_bytes).close()
    return _Ready(manifest=manifest, planner=planner, reads=reads, request=request)


def _compare_tensor(manifest: Manifest, name: str, tensor: torch.Tensor) -> str:
    entry = manifest.tensors.get(name)
    if entry is None:
        return "a JSON value in the checkpoint, a tensor here" if name in manifest.names else "missing"
    differences = []
    if entry.dtype != CODES[tensor.dtype]:
        differences.append(f"dtype {entry.dtype} in the checkpoint, {CODES[tensor.dtype]} here")
    if entry.shape != tuple(tensor.shape):
        differences.append(f"shape {list(entry.shape)} in the checkpoint, {list(tensor.shape)} here")
    return "; ".join(differences)


def _compare_value(manifest: Manifest, name: str, leaf: Common | Owned) -> str:
    here = f"owned by {leaf.module!r}" if isinstance(leaf, Owned) else "common"
    if name in manifest.tensors:
        return f"a tensor in the checkpoint, {here} here"
    if name not in manifest.names:
        return "missing"
    there = f"owned by {manifest.owned[name].module!r}" if name in manifest.owned else "common"
    return "" if here == there else f"{there} in the checkpoint, {here} here"


def _check_requests(requests: list[_Request], manifest: Manifest, where: str, *, strict: bool) -> None:
    if len({request.identity for request in requests}) > 1:
        raise CheckpointError(where, expected="the same checkpoint on every rank", got="different manifests")
    misfits = {name: text for request in requests for name, text in request.misfits.items()}
    if strict:
        asked = frozenset[str]().union(*(request.names for request in requests))
        misfits |= dict.fromkeys(manifest.names - asked, "unexpected: in the checkpoint, not asked for")
    if misfits:
        lines = "".join(f"\n  {name}: {text}" for name, text in sorted(misfits.items()))
        raise CheckpointError(
            where,
            expected="every entry that is asked for, with its dtype and shape",
            got=f"{len(misfits)} that do not fit:{lines}\n",
            fix="Nothing was changed. Load it with the config that it was saved with, or another checkpoint.",
        )


def _read(folder: Path, ready: _Ready) -> None:
    with contextlib.ExitStack() as stack, torch.no_grad():
        reader, opened = None, ""
        for piece, item in ready.reads:
            if reader is None or piece.shard != opened:
                opened = piece.shard
                stack.close()  # one file is open at a time, however many there are
                reader = stack.enter_context(
                    ShardReader(folder / opened, ready.manifest.shards[opened], ready.manifest.block_bytes)
                )
            target = ready.planner.resolve_tensor(item).detach()
            for rows, source in _read_slabs(reader, piece, target, tuple(item.storage_offsets)):
                (target[rows] if target.dim() else target).copy_(source)
            ready.planner.commit_tensor(item, target)


def _describe(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(piece.box.offset), sizes=torch.Size(piece.box.shape))
            for piece in entry.pieces
        ],
    )


def _find_piece(manifest: Manifest, index: MetadataIndex) -> Piece:
    assert index.index is not None, index  # the planner numbers the pieces that it was given
    return manifest.tensors[index.fqn].pieces[index.index]


def _read_slabs(
    reader: ShardReader, piece: Piece, target: torch.Tensor, offset: tuple[int, ...]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the box of ``piece`` at ``offset`` with the shape of ``target``, some rows at a time.

    A slab is read as one range of bytes, from its first element to its last.
    """
    strides = [math.prod(piece.box.shape[dim + 1 :]) for dim in range(len(offset))]
    item_bytes = target.element_size()
    rows = target.shape[0] if target.dim() else 1
    rows_each = max(1, _SLAB_BYTES // (strides[0] * item_bytes)) if strides else 1
    for low in range(0, rows, rows_each):
        shape = list(target.shape)
        if shape:
            shape[0] = min(rows_each, rows - low)
        start = low * strides[0] if strides else 0
        first = start + sum(at * stride for at, stride in zip(offset, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        data = reader.read(piece.begin + first * item_bytes, piece.begin + (last + 1) * item_bytes)
        source = torch.frombuffer(data, dtype=target.dtype).as_strided(shape, strides)
        yield slice(low, low + (shape[0] if shape else 1)), source
