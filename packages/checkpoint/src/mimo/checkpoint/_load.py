"""Loading: PyTorch's planner says which boxes of the saved pieces this rank needs; only their bytes are read.

Two object collectives: everything that does not fit, before anything is changed, and whether reading went well. The
planner's own global step changes nothing and is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
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

from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest, Piece, TensorEntry
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._matching import Request, Wish, check_requests, make_request
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._read_box import read_box
from mimo.checkpoint._reader import ShardReader, make_slab
from mimo.checkpoint._tensors import DTYPES
from mimo.checkpoint._tree import fill, flatten
from mimo.hooks import StateTree


@attrs.frozen(kw_only=True)
class Loaded:
    """What `load` has done.

    Args:
        tree: nested dicts like the tree asked for: the same tensors, and `Common` and `Owned` leaves with the values
            saved.
        lacking: names asked for that the checkpoint lacks and that keep what they hold, of all ranks.
        left: names of the checkpoint that no rank asked for.
    """

    tree: StateTree
    lacking: frozenset[str]
    left: frozenset[str]


@attrs.frozen(kw_only=True)
class _Ready:
    """What one rank has found out before it changes a tensor; ``reads`` in the order of the files."""

    manifest: Manifest
    planner: DefaultLoadPlanner
    reads: list[tuple[Piece, ReadItem]]
    request: Request


def load(
    step_folder: Path,
    tree: StateTree,
    *,
    rename: Mapping[str, str] | None = None,
    may_lack: Iterable[str] = (),
    refuse_left: bool = False,
    may_leave: Iterable[str] = (),
    told: Callable[[], None] | None = None,
) -> Loaded:
    """Fill ``tree`` from a checkpoint; collective over the default process group.

    Tensors and DTensors are filled in place, whatever their placements and those at saving; only the needed byte
    ranges are read, and their blocks verified. Every rank of the group calls it, each with the entries it holds.
    Names are those of the flattened tree, keys joined with dots.

    Args:
        step_folder: a committed checkpoint.
        tree: the entries asked for; the values of its JSON leaves matter only where the checkpoint may lack them.
        rename: dotted prefix of names here -> dotted prefix of names in the checkpoint; the longest that fits a name
            counts, whole keys only. A renamed module's owned values are found under the owner's name there.
        may_lack: glob patterns (`fnmatch`) of names here; those that the checkpoint lacks keep what they hold.
        refuse_left: refuse entries of the checkpoint that no rank asks for, instead of leaving them.
        may_leave: glob patterns of names in the checkpoint that may be left all the same.
        told: called for each block (1 MiB) that this rank has read, so that somebody sees it going on.

    Raises:
        CheckpointError: on every rank. Where entries are missing, unexpected or misshapen, a rename fits no name, or
            two names here mean one there, all of it is listed; then, or where a file is missing or cut short, nothing
            was changed. Where a block is damaged, tensors may be half filled and must be loaded from another
            checkpoint.
    """
    ranks, folder, where = Ranks.current(), Path(step_folder), str(step_folder)
    wish = Wish(
        rename=dict(rename or {}), may_lack=tuple(may_lack), refuse_left=refuse_left, may_leave=tuple(may_leave)
    )

    prepared = ranks.attempt(lambda: _prepare(folder, tree, wish), where=where)
    requests = take_all(ranks.gather_everywhere(prepared if isinstance(prepared, Failure) else prepared.request))
    ready = take(prepared)
    left = check_requests(requests, ready.manifest, where, wish)

    outcome = ranks.attempt(lambda: _read(folder, ready, told), where=where)
    take_all(ranks.gather_everywhere(outcome))
    held = {**ready.manifest.common, **{name: entry.value for name, entry in ready.manifest.owned.items()}}
    values = {here: held[there] for here, there in ready.request.names.items() if there in held}
    lacking = frozenset(name for request in requests for name in request.lacking)
    return Loaded(tree=fill(tree, values), lacking=lacking, left=left)


def _prepare(folder: Path, tree: StateTree, wish: Wish) -> _Ready:
    """Do all that can fail before a tensor is touched."""
    manifest, flat = read_manifest(folder), flatten(tree)
    request = make_request(manifest, flat, wish)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reads: list[tuple[Piece, ReadItem]] = []
    if not request.misfits:
        tensors = {name: tensor for name, tensor in flat.tensors.items() if name not in request.lacking}
        entries = {name: manifest.tensors[request.names[name]] for name in tensors}
        planner.set_up_planner(dict(tensors), Metadata({name: _describe(entry) for name, entry in entries.items()}))
        items = planner.finish_plan(planner.create_local_plan()).items
        reads = [(_find_piece(entries, item.storage_index), item) for item in items]
        reads.sort(key=lambda read: (read[0].shard, read[0].begin))
        slab = make_slab(manifest.block_bytes)
        for name in sorted({piece.shard for piece, _ in reads}):
            ShardReader(folder / name, manifest.shards[name], slab).close()
    return _Ready(manifest=manifest, planner=planner, reads=reads, request=request)


def _read(folder: Path, ready: _Ready, told: Callable[[], None] | None) -> None:
    slab = make_slab(ready.manifest.block_bytes)
    for name, reads in itertools.groupby(ready.reads, key=lambda read: read[0].shard):
        with ShardReader(folder / name, ready.manifest.shards[name], slab, told=told) as reader:
            for piece, item in reads:
                target = ready.planner.resolve_tensor(item).detach()
                place = tuple(low + at for low, at in zip(piece.box.offset, item.storage_offsets, strict=True))
                read_box(reader, piece, Box(place, tuple(target.shape)), target)
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


def _find_piece(entries: Mapping[str, TensorEntry], index: MetadataIndex) -> Piece:
    assert index.index is not None, index  # the planner numbers the pieces that it was given
    return entries[index.fqn].pieces[index.index]
