"""Who writes what: from the entries that each rank holds to one order for each, which every later save uses too.

PyTorch's planner says which pieces there are and whether they make up each tensor; which of its holders writes a piece
that several hold is decided here, by bytes. An order holds no tensor and no value, so that it can't bring back those of
an earlier step. It is good for as long as the `structure` of all ranks is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from mimo.checkpoint._agree import Offer, check_tensors
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Piece, TensorEntry
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._tensors import CODES, DTYPES, examine
from mimo.checkpoint._tree import Flat
from mimo.checkpoint._wire import Wire
from mimo.checkpoint._writer import LAYOUTS, Cut, Layout, lay_out
from mimo.hooks import CheckpointError, Owned

Structure = Mapping[str, tuple[Any, ...]]
"""What an order depends on, by flat name; two are compared with ``==``."""


@attrs.frozen(kw_only=True)
class Order:
    """What one rank is to write, its ``layouts``; and on rank 0 alone the manifest's ``tensors``, those of all."""

    layouts: tuple[Layout, ...]
    tensors: Mapping[str, TensorEntry] = MappingProxyType({})


def _pack_offer(offer: Offer) -> dict[str, Any]:
    return {"items": [_pack_item(item) for item in offer.plan.items], "values": sorted(offer.values)}


def _pack_item(item: WriteItem) -> list[Any]:
    assert item.tensor_data is not None, item.index.fqn  # only tensors are planned
    data = item.tensor_data
    box = [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [item.index.fqn, item.type.name, CODES[data.properties.dtype], list(data.size), *box]


def _unpack_item(packed: list[Any]) -> WriteItem:
    """Return an item of which what a plan of the whole is made of is what it was."""
    name, kind, code, size, offsets, sizes = packed
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=DTYPES[code]), size=torch.Size(size))
    index = MetadataIndex(name, torch.Size(offsets))
    return WriteItem(index=index, type=WriteItemType[kind], tensor_data=data)


def _unpack_offer(packed: dict[str, Any]) -> Offer:
    plan = SavePlan([_unpack_item(item) for item in packed["items"]])
    return Offer(plan=plan, values=frozenset(packed["values"]))


OFFERS = Wire(_pack_offer, _unpack_offer)


def structure(flat: Flat) -> Structure:
    """Return all of a rank's entries that an order depends on: names, dtypes, shapes, placements, meshes and owners.

    It looks at no data and asks nobody, and takes microseconds a tensor.
    """
    meshes: dict[int, tuple[Any, ...]] = {}
    found: dict[str, tuple[Any, ...]] = {
        name: (leaf.module if isinstance(leaf, Owned) else None,) for name, leaf in flat.values.items()
    }
    with torch.no_grad():
        for name, tensor in flat.tensors.items():
            if not isinstance(tensor, DTensor):
                found[name] = (tensor.dtype, tensor.shape, tensor.layout, tensor.device)
                continue
            local, mesh = tensor.to_local(), tensor.device_mesh
            if id(mesh) not in meshes:  # a mesh is a tensor itself, and thousands of parameters share one
                meshes[id(mesh)] = (mesh.shape, tuple(mesh.mesh.flatten().tolist()), mesh.get_coordinate())
            found[name] = (
                *(tensor.dtype, tensor.shape, local.layout, local.device),
                *(local.shape, tensor.placements, meshes[id(mesh)]),
            )
    return found


def plan_together(ranks: Ranks, flat: Flat | Failure, *, shard_bytes: int, where: str) -> Order:
    """Return what this rank is to write; collective: the local plans go to rank 0, each rank's order comes back.

    Args:
        ranks: all that save together.
        flat: this rank's entries, or why there are none.
        shard_bytes: see `lay_out`.
        where: the step's folder, for messages.

    Raises:
        CheckpointError: on every rank, if a tensor of any can't be saved, or ranks disagree.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def offer() -> Offer:
        entries = take(flat)
        examine(entries.tensors)
        planner.set_up_planner(dict(entries.tensors), is_coordinator=ranks.rank == 0)
        return Offer(plan=planner.create_local_plan(), values=frozenset(entries.values))

    offers = ranks.gather(ranks.attempt(offer, where=where), OFFERS)
    tensors: Mapping[str, TensorEntry] = {}
    orders: list[tuple[Layout, ...] | Failure] = []
    if ranks.rank == 0:
        decided = ranks.attempt(lambda: _decide(planner, take_all(offers), shard_bytes, where), where=where)
        if isinstance(decided, Failure):
            orders = [decided] * ranks.size
        else:
            orders, tensors = [*decided[0]], decided[1]
    layouts = ranks.scatter(orders, LAYOUTS)
    return Order(layouts=take(layouts), tensors=tensors)


def share_out(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave each piece to one of the ranks that hold it: the largest first, each to who has the fewest bytes so far.

    PyTorch's planner shares out in the order of names, not counting what a rank alone holds.

    Args:
        plans: local plans by rank.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items[item.index] = item
    filled = [0] * len(plans)
    writers: dict[MetadataIndex, int] = {}
    # Those with one holder come first, since they leave no choice.
    for index in sorted(items, key=lambda index: (len(holders[index]) > 1, -_bytes(items[index]))):
        writers[index] = min(holders[index], key=lambda rank: filled[rank])
        filled[writers[index]] += _bytes(items[index])
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _decide(
    planner: DefaultSavePlanner, offers: list[Offer], shard_bytes: int, where: str
) -> tuple[list[tuple[Layout, ...]], dict[str, TensorEntry]]:
    """Return each rank's shards, and the tensors that they make up."""
    check_tensors(offers)
    try:
        plans, metadata = planner.create_global_plan(share_out([offer.plan for offer in offers]))
    except ValueError as error:
        raise CheckpointError(where, expected="pieces that make up each tensor exactly once", got=str(error)) from error
    layouts = [
        lay_out(rank, [_cut(item) for item in plan.items], shard_bytes=shard_bytes) for rank, plan in enumerate(plans)
    ]
    pieces: dict[str, list[Piece]] = {}
    for name, piece in (found for shards in layouts for layout in shards for found in layout.pieces()):
        pieces.setdefault(name, []).append(piece)
    tensors = {}
    for name, data in metadata.state_dict_metadata.items():
        assert isinstance(data, TensorStorageMetadata), name  # only tensors are planned
        tensors[name] = TensorEntry(
            dtype=CODES[data.properties.dtype], shape=tuple(data.size), pieces=tuple(pieces.get(name, ()))
        )
    return layouts, tensors


def _cut(item: WriteItem) -> Cut:
    assert item.tensor_data is not None, item.index.fqn  # only tensors are planned
    chunk = item.tensor_data.chunk
    return Cut(
        name=item.index.fqn,
        box=Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes)),
        dtype=item.tensor_data.properties.dtype,
    )


def _bytes(item: WriteItem) -> int:
    return _cut(item).bytes
