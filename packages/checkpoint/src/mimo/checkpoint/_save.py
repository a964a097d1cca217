"""Saving one step: the ranks agree on its values, each writes its shards, rank 0 commits.

Four collectives of JSON, however many tensors there are: values to rank 0, the folder to all, what was written to rank
0, and the outcome to all. A failure anywhere travels with the next of them, so every rank hears of it and nothing is
committed. Before them go the two of `mimo.checkpoint._plan`, if the ranks have no order yet.

`torch.distributed.checkpoint.save` itself isn't used: it sends exceptions as pickles (ours can't be unpickled), takes
twice the collectives, and its planner takes any of two replicas that differ in dtype or shape.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from mimo.checkpoint import _folder, _json
from mimo.checkpoint._agree import RECORDS, Record, Value, merge_values
from mimo.checkpoint._blocks import BLOCK_BYTES
from mimo.checkpoint._folder import Keep
from mimo.checkpoint._manifest import SHARD_ENTRIES, Manifest, OwnedEntry, ShardEntry
from mimo.checkpoint._manifest_file import MANIFEST_NAME, parse, to_bytes
from mimo.checkpoint._plan import Order, plan_together
from mimo.checkpoint._ranks import Failure, Ranks, take, take_all
from mimo.checkpoint._staging import direct
from mimo.checkpoint._tree import Flat, collect
from mimo.checkpoint._wire import Wire
from mimo.checkpoint._writer import SHARD_BYTES, Layout, write_layouts
from mimo.hooks import CheckpointError, Owned, StateTree, parse_json

_PATHS = Wire(str, Path)


@attrs.frozen(kw_only=True)
class Contents:
    """What one rank saves at one step.

    Args:
        record: its values, as text of that step.
        data: gives the bytes of each of its shards, see `write_layouts`.
    """

    record: Record
    data: Callable[[Layout], Iterable[memoryview]]


@attrs.frozen(kw_only=True)
class _Begun:
    """What rank 0 has made of everybody's values."""

    partial: Path
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
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save ``tree`` as the checkpoint of ``step`` and return its folder; collective over the default process group.

    Every rank of the group calls it, one that holds nothing with an empty tree; without a group the process is alone.
    Plain tensors of one name are taken for replicas and written once, replicated DTensors too. A checkpoint of the
    same step is replaced: a run that went back to an earlier step meets its own old ones. To save many steps of a run,
    use a `Saver`.

    Args:
        folder: holds all steps; made if missing, shared by all ranks.
        step: steps trained so far, 0 or more.
        tree: this rank's part of the state; leaves are tensors, DTensors, `Common` or `Owned`.
        config: the resolved config as plain JSON data, equal on all ranks.
        topology: the grids as plain JSON data, equal on all ranks.
        keep: afterwards this many steps are left of those up to this one, the lowest are deleted; None: all. Steps
            above it, of a run that went back, are left.
        shard_bytes: a rank begins a new file before one would hold more bytes of data.
        group: of the same ranks as the default group, for what they say to each other; None: the default group. Where
            that is NCCL's, one of gloo spares devices the work.

    Raises:
        WriteError: on every rank, if files could not be written. The checkpoints that were there are untouched.
        CheckpointError: on every rank, if any leaf can't be saved, ranks disagree, or anything else failed on any of
            them. The checkpoints that were there are untouched then too.
    """
    ranks, where, keeps = Ranks.current(group), name_place(folder, step), Keep(newest=keep)
    flat = ranks.attempt(lambda: collect(tree), where=where)
    order = plan_together(ranks, flat, shard_bytes=shard_bytes, where=where)
    entries = take(flat)  # a failure has been raised
    contents = ranks.attempt(
        lambda: Contents(record=make_record(entries, step, config, topology), data=direct(entries.tensors)),
        where=where,
    )
    return take(write_together(ranks, Path(folder), contents, order, keeps, where=where, new_order=True))


def name_place(folder: Path, step: int) -> str:
    """Return the place of a step for messages, of a wrong one too."""
    return str(Path(folder) / (_folder.name_step(step) if type(step) is int else "step"))


def make_record(flat: Flat, step: int, config: Mapping[str, Any], topology: Mapping[str, Any]) -> Record:
    """Return a rank's values as they are now, as text: later changes of them don't matter.

    Raises:
        CheckpointError: one of them is no JSON, or the step no step.
    """
    if type(step) is not int or step not in _folder.STEPS:
        raise CheckpointError("checkpoint step", expected="a whole number of at most 18 digits", got=repr(step))
    return Record(
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


def write_together(
    ranks: Ranks,
    folder: Path,
    contents: Contents | Failure,
    order: Order,
    keep: Keep,
    *,
    where: str,
    new_order: bool,
    on_progress: Callable[[], None] | None = None,
) -> Path | Failure:
    """Write and commit one step; collective. Every rank gets the step's folder, or the failure of all of them.

    Args:
        ranks: all that save together.
        folder: holds all steps.
        contents: this rank's part, or why there is none.
        order: what this rank writes.
        keep: which older steps stay.
        where: the step's folder, for messages.
        new_order: whether nothing was written by this order yet.
        on_progress: see `write_layouts`.
    """
    record = contents if isinstance(contents, Failure) else contents.record
    records = ranks.gather(record, RECORDS)
    begun: _Begun | Failure | None = None
    if ranks.rank == 0:
        begun = ranks.attempt(lambda: _begin(folder, take_all(records), order), where=where, writes=True)
    partial = ranks.share(begun.partial if isinstance(begun, _Begun) else begun, _PATHS)
    if isinstance(partial, Failure):
        return partial

    def write() -> dict[str, ShardEntry]:
        if not partial.is_dir():
            raise CheckpointError(
                str(partial.parent),
                expected="a folder that all ranks share",
                got=f"no {partial.name} in it, which rank 0 has just made",
                fix="Name one on a disk that all machines see, by an absolute path.",
            )
        return write_layouts(partial, order.layouts, take(contents).data, on_progress=on_progress)

    results = ranks.gather(ranks.attempt(write, where=where, writes=True), SHARD_ENTRIES)
    outcome: Path | Failure | None = None
    if isinstance(begun, _Begun):
        chosen = begun
        outcome = ranks.attempt(
            lambda: _commit(
                chosen,
                _manifest(chosen, take_all(results), take_all(records)[0], order),
                keep,
                checks_tensors=new_order,
            ),
            where=where,
            writes=True,
        )
        if isinstance(outcome, Failure):
            shutil.rmtree(partial, ignore_errors=True)  # else the next save deletes it
    return ranks.share(outcome, _PATHS)


def _begin(folder: Path, records: list[Record], order: Order) -> _Begun:
    common, owned = merge_values(records)
    room = sum(piece.end - piece.begin for entry in order.tensors.values() for piece in entry.pieces)
    partial = _folder.begin(folder, int(records[0].about["step"]), room=room)
    return _Begun(partial=partial, common=common, owned=owned)


def _manifest(begun: _Begun, results: list[dict[str, ShardEntry]], first: Record, order: Order) -> Manifest:
    about = {key: _json.decode(parse_json(text)) for key, text in first.about.items()}
    return Manifest(
        step=about["step"],
        block_bytes=BLOCK_BYTES,
        tensors=order.tensors,
        shards={name: entry for shards in results for name, entry in shards.items()},
        common=begun.common,
        owned=begun.owned,
        topology=about["topology"],
        config=about["config"],
    )


def seal(partial: Path, manifest: Manifest, *, checks_tensors: bool = True) -> Path:
    """Add the manifest to a partial folder whose shards are written, and commit it; return the step's folder."""
    path, content = partial / MANIFEST_NAME, to_bytes(manifest)
    # What a reader would refuse is never committed. The tensors, which take longest, are the order's.
    parse(content if checks_tensors else to_bytes(attrs.evolve(manifest, tensors={})), str(path))
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return _folder.commit(partial, manifest.step)


def _commit(begun: _Begun, manifest: Manifest, keep: Keep, *, checks_tensors: bool) -> Path:
    final = seal(begun.partial, manifest, checks_tensors=checks_tensors)
    with contextlib.suppress(OSError):  # the step is there, whatever becomes of others
        _folder.prune(final.parent, manifest.step, keep)
    return final
