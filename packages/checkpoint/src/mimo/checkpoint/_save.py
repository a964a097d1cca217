"""Saving: PyTorch's planner decides who writes what, each rank writes its shards, rank 0 commits.

Four object collectives over the default group, however many tensors there are: the local plans and JSON values to rank
0, each rank's final plan back, what was written to rank 0, and the outcome to all. A failure anywhere travels with the
next of them, so every rank raises it and nothing is committed.

`torch.distributed.checkpoint.save` itself isn't used: it sends exceptions as pickles (ours can't be unpickled), takes
twice the collectives, and its planner takes any of two replicas that differ in dtype or shape.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from mimo.checkpoint import _folder, _json
from mimo.checkpoint._agree import Offer, Value, check_tensors, merge_values
from mimo.checkpoint._blocks import BLOCK_BYTES
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest, OwnedEntry, Piece, TensorEntry
from mimo.checkpoint._manifest_file import MANIFEST_NAME, parse, to_bytes
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._tensors import CODES
from mimo.checkpoint._tree import flatten
from mimo.checkpoint._writer import SHARD_BYTES, Part, Written, write_shards
from mimo.hooks import CheckpointError, Owned, StateTree


@attrs.frozen(kw_only=True)
class _Order:
    """What one rank is to write, and where."""

    partial: Path
    plan: SavePlan


@attrs.frozen(kw_only=True)
class _Decision:
    """What rank 0 has decided of everybody's offers."""

    partial: Path
    plans: list[SavePlan]
    metadata: Metadata
    common: dict[str, Any]
    owned: dict[str, OwnedEntry]


def save(
    folder: Path,
    step: int,
    tree: StateTree,
    *,
    config: Mapping[str, Any],
    topology: Mapping[str, Any],
    keep: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Save ``tree`` as the checkpoint of ``step`` and return its folder; collective over the default process group.

    Every rank of the group calls it, one that holds nothing with an empty tree; without a group the process is alone.
    Plain tensors of one name are taken for replicas and written once, replicated DTensors too. A checkpoint of the
    same step is replaced: a run that went back to an earlier step meets its own old ones.

    Args:
        folder: holds all steps; made if missing, shared by all ranks.
        step: steps trained so far, 0 or more.
        tree: this rank's part of the state; leaves are tensors, DTensors, `Common` or `Owned`.
        config: the resolved config as plain JSON data, equal on all ranks.
        topology: the grids as plain JSON data, equal on all ranks.
        keep: afterwards the lowest steps are deleted until this many are left, the one just saved included; None: all.
        shard_bytes: a rank begins a new file before one would hold more bytes of data.

    Raises:
        CheckpointError: on every rank, if any leaf can't be saved, ranks disagree, or writing failed on any of them.
            The checkpoints that were there are untouched then.
    """
    ranks, folder = Ranks.current(), Path(folder)
    where = str(folder / _folder.name_step(step))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    offers = ranks.gather(
        ranks.attempt(
            lambda: _offer(planner, tree, step, config, topology, keep, is_first=ranks.rank == 0), where=where
        )
    )
    decision = None
    orders: list[_Order | Failure] = []
    if ranks.rank == 0:
        decided = ranks.attempt(lambda: _decide(planner, take_all(offers), folder, step), where=where)
        if isinstance(decided, Failure):
            orders = [decided] * ranks.size
        else:
            decision = decided
            orders = [_Order(partial=decided.partial, plan=plan) for plan in decided.plans]
    order = take(ranks.scatter(orders))

    results = ranks.gather(ranks.attempt(lambda: _write(planner, order, ranks.rank, shard_bytes), where=where))
    outcome: Path | Failure = folder / _folder.name_step(step)
    if decision is not None:
        chosen = decision
        outcome = ranks.attempt(lambda: _commit(chosen, take_all(results), step, config, topology, keep), where=where)
        if isinstance(outcome, Failure):
            shutil.rmtree(chosen.partial, ignore_errors=True)  # else the next save deletes it
    return take(ranks.share(outcome))


def _offer(
    planner: DefaultSavePlanner,
    tree: StateTree,
    step: int,
    config: Mapping[str, Any],
    topology: Mapping[str, Any],
    keep: int | None,
    *,
    is_first: bool,
) -> Offer:
    if type(step) is not int or step < 0:
        raise CheckpointError("checkpoint step", expected="a whole number", got=repr(step))
    if keep is not None and keep < 1:
        raise CheckpointError("checkpoint.keep", expected="at least 1", got=repr(keep), fix="Leave it out to keep all.")
    flat = flatten(tree)
    planner.set_up_planner(dict(flat.tensors), is_coordinator=is_first)
    return Offer(
        plan=planner.create_local_plan(),
        values={
            name: Value(
                text=_json.write(_json.encode(leaf.value, name)),
                module=leaf.module if isinstance(leaf, Owned) else None,
            )
            for name, leaf in flat.values.items()
        },
        about={
            "step": str(step),
            "config": _json.write(_json.encode(dict(config), "config")),
            "topology": _json.write(_json.encode(dict(topology), "topology")),
        },
    )


def _decide(planner: DefaultSavePlanner, offers: list[Offer], folder: Path, step: int) -> _Decision:
    common, owned = merge_values(offers)
    check_tensors(offers)
    try:
        plans, metadata = planner.create_global_plan([offer.plan for offer in offers])
    except ValueError as error:
        raise CheckpointError(
            _folder.name_step(step), expected="pieces that make up each tensor exactly once", got=str(error)
        ) from error
    return _Decision(partial=_folder.begin(folder, step), plans=plans, metadata=metadata, common=common, owned=owned)


def _write(planner: DefaultSavePlanner, order: _Order, rank: int, shard_bytes: int) -> Written:
    parts = []
    for item in planner.finish_plan(order.plan).items:
        assert item.tensor_data is not None, item.index.fqn  # only tensors are planned
        chunk = item.tensor_data.chunk
        parts.append(
            Part(
                name=item.index.fqn,
                box=Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes)),
                dtype=item.tensor_data.properties.dtype,
                fetch=functools.partial(_fetch, planner, item),
            )
        )
    return write_shards(order.partial, rank, parts, shard_bytes=shard_bytes)


def _fetch(planner: DefaultSavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor), item.index.fqn  # only tensors are planned
    return data


def _commit(
    decision: _Decision,
    results: list[Written],
    step: int,
    config: Mapping[str, Any],
    topology: Mapping[str, Any],
    keep: int | None,
) -> Path:
    pieces: dict[str, list[Piece]] = {}
    for name, piece in (found for written in results for found in written.pieces):
        pieces.setdefault(name, []).append(piece)
    tensors = {}
    for name, data in decision.metadata.state_dict_metadata.items():
        assert isinstance(data, TensorStorageMetadata), name  # only tensors are planned
        tensors[name] = TensorEntry(
            dtype=CODES[data.properties.dtype], shape=tuple(data.size), pieces=tuple(pieces.get(name, ()))
        )
    content = to_bytes(
        Manifest(
            step=step,
            block_bytes=BLOCK_BYTES,
            tensors=tensors,
            shards={name: entry for written in results for name, entry in written.shards.items()},
            common=decision.common,
            owned=decision.owned,
            topology=topology,
            config=config,
        )
    )
    path = decision.partial / MANIFEST_NAME
    parse(content, str(path))  # what a reader would refuse is never committed
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    final = _folder.commit(decision.partial, step)
    if keep is not None:
        _folder.prune(final.parent, step, keep)
    return final
