"""Loading: PyTorch's planner says which boxes of the saved pieces this rank needs; only their bytes are read.

Two object collectives: everything that does not fit, before anything is changed, and whether reading went well. Of the
planner no more is needed than how it finds the boxes of one tensor; the rest of it changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest, TensorEntry
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._matching import REQUESTS, Request, Wish, check_requests, make_request
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._read_box import Read
from mimo.checkpoint._read_shards import count_threads, own_place, read_shards
from mimo.checkpoint._reader import ShardReader, make_slab
from mimo.checkpoint._tensors import examine
from mimo.checkpoint._tree import collect, fill
from mimo.checkpoint._wire import PLAIN
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
    """What one rank has found out before it changes a tensor.

    Args:
        manifest: of the checkpoint.
        reads: in the order of the files.
        request: what the other ranks are to know.
    """

    manifest: Manifest
    reads: list[Read]
    request: Request


def load(
    step_folder: Path,
    tree: StateTree,
    *,
    rename: Mapping[str, str] | None = None,
    may_lack: Iterable[str] = (),
    refuse_left: bool = False,
    may_leave: Iterable[str] = (),
    on_progress: Callable[[], None] | None = None,
    group: dist.ProcessGroup | None = None,
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
        on_progress: called for each block (1 MiB) that this thread has read, to show its progress; others, on
            cores that no rank uses, may have read more.
        group: see `save`.

    Raises:
        CheckpointError: on every rank. Where entries are missing, unexpected or misshapen, a rename fits no name, or
            two names here mean one there, all of it is listed; then, or where a file is missing or cut short, nothing
            was changed. Where a block is damaged, tensors may be half filled and must be loaded from another
            checkpoint.
    """
    ranks, folder, where = Ranks.current(group), Path(step_folder), str(step_folder)
    wish = Wish(
        rename=dict(rename or {}), may_lack=tuple(may_lack), refuse_left=refuse_left, may_leave=tuple(may_leave)
    )

    prepared = ranks.attempt(lambda: _prepare(folder, tree, wish), where=where)
    request = prepared if isinstance(prepared, Failure) else prepared.request
    outcomes = ranks.gather_everywhere(request, REQUESTS)
    requests = take_all(outcomes)
    ready = take(prepared)
    left = check_requests(requests, ready.manifest, where, wish)

    threads = count_threads([request.place for request in requests])
    outcome = ranks.attempt(
        lambda: read_shards(folder, ready.manifest, ready.reads, threads=threads, on_progress=on_progress), where=where
    )
    take_all(ranks.gather_everywhere(outcome, PLAIN))
    held = {**ready.manifest.common, **{name: entry.value for name, entry in ready.manifest.owned.items()}}
    values = {here: held[there] for here, there in ready.request.names.items() if there in held}
    lacking = frozenset(name for request in requests for name in request.lacking)
    return Loaded(tree=fill(tree, values), lacking=lacking, left=left)


def _prepare(folder: Path, tree: StateTree, wish: Wish) -> _Ready:
    """Do all that can fail before a tensor is touched."""
    manifest, flat = read_manifest(folder), collect(tree)
    held = examine(flat.tensors)
    request = make_request(manifest, flat, wish, place=own_place())
    reads: list[Read] = []
    if not request.misfits:
        for name, one in held.items():
            if one.box is not None and name not in request.lacking:
                reads += _plan(name, manifest.tensors[request.names[name]], one.local, one.box)
        reads.sort(key=lambda read: (read.piece.shard, read.piece.begin))
        slab = make_slab(manifest.block_bytes)
        for name in sorted({read.piece.shard for read in reads}):
            ShardReader(folder / name, manifest.shards[name], slab).close()
    return _Ready(manifest=manifest, reads=reads, request=request)


def _plan(name: str, entry: TensorEntry, local: torch.Tensor, box: Box) -> Iterator[Read]:
    """Yield what is to be read to fill ``local``, which is ``box`` of a tensor."""
    chunks = [_chunk(piece.box) for piece in entry.pieces]
    data = TensorStorageMetadata(TensorProperties(dtype=local.dtype), torch.Size(entry.shape), chunks)
    for item in create_read_items_for_chunk_list(name, data, [_chunk(box)]):
        assert item.storage_index.index is not None, item  # the planner numbers the pieces that it was given
        piece = entry.pieces[item.storage_index.index]
        place = map(operator.add, piece.box.offset, item.storage_offsets)
        found = Box(tuple(place), tuple(item.lengths))
        yield Read(piece=piece, box=found, target=local if found == box else local[found.slices(box)])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))
