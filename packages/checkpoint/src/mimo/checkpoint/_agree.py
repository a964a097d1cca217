"""What the ranks offer to save, compared: common values are equal, replicas too, and each name is one kind of entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch.distributed.checkpoint.planner import SavePlan

from mimo.checkpoint import _json
from mimo.checkpoint._manifest import OwnedEntry
from mimo.checkpoint._wire import Wire
from mimo.hooks import CheckpointError, parse_json


@attrs.frozen(kw_only=True)
class Value:
    """A JSON leaf as one rank holds it: encoded text, and the module that owns it, None for a common one."""

    text: str
    module: str | None


@attrs.frozen(kw_only=True)
class Offer:
    """Which entries one rank would save.

    Args:
        plan: the local plan of PyTorch's planner for this rank's tensors.
        values: flat names of its JSON leaves.
    """

    plan: SavePlan
    values: frozenset[str]


@attrs.frozen(kw_only=True)
class Record:
    """What one rank saves as JSON at one step.

    Args:
        values: JSON leaves by flat name.
        about: step, config and topology as text, equal on all ranks.
    """

    values: Mapping[str, Value]
    about: Mapping[str, str]


def _pack_record(record: Record) -> dict[str, Any]:
    values = {name: [value.text, value.module] for name, value in record.values.items()}
    return {"values": values, "about": dict(record.about)}


def _unpack_record(packed: dict[str, Any]) -> Record:
    values = {name: Value(text=text, module=module) for name, (text, module) in packed["values"].items()}
    return Record(values=values, about=packed["about"])


RECORDS = Wire(_pack_record, _unpack_record)


def merge_values(records: Sequence[Record]) -> tuple[dict[str, Any], dict[str, OwnedEntry]]:
    """Return the common and the owned values of all ranks, each once.

    Raises:
        CheckpointError: two ranks hold different values under one name; names the key, the values and the ranks.
    """
    found: dict[str, tuple[int, Value]] = {}
    for rank, record in enumerate(records):
        for key, text in record.about.items():
            if text != records[0].about[key]:
                raise _differ(key, records[0].about[key], 0, text, rank)
        for name, value in record.values.items():
            first_rank, first = found.setdefault(name, (rank, value))
            if (first.module, first.text) != (value.module, value.text):
                raise _differ(name, _show(first), first_rank, _show(value), rank)
    decoded = {name: _json.decode(parse_json(value.text)) for name, (_, value) in found.items()}
    owners = {name: value.module for name, (_, value) in found.items()}
    return (
        {name: value for name, value in decoded.items() if owners[name] is None},
        {name: OwnedEntry(module=module, value=decoded[name]) for name, module in owners.items() if module is not None},
    )


def check_tensors(offers: Sequence[Offer]) -> None:
    """Refuse tensors of one name that can't be parts of one tensor; PyTorch's planner would keep any of them.

    Raises:
        CheckpointError: dtype, shape, or the shape of the same piece differ between ranks, or a value has that name.
    """
    whole: dict[str, tuple[int, str]] = {}
    pieces: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    values = {name: rank for rank, offer in enumerate(offers) for name in offer.values}
    for rank, offer in enumerate(offers):
        for item in offer.plan.items:
            name, data = item.index.fqn, item.tensor_data
            assert data is not None, name  # only tensors are planned
            shown = f"{data.properties.dtype} {list(data.size)}"
            first_rank, first = whole.setdefault(name, (rank, shown))
            if shown != first:
                raise _differ(name, first, first_rank, shown, rank)
            box = f"a piece of {list(data.chunk.sizes)} at {list(data.chunk.offsets)}"
            first_rank, first = pieces.setdefault((name, tuple(data.chunk.offsets)), (rank, box))
            if box != first:
                raise _differ(name, first, first_rank, box, rank)
            if name in values:
                raise _differ(name, "a tensor", rank, "a JSON value", values[name])


def _differ(name: str, first: str, first_rank: int, second: str, second_rank: int) -> CheckpointError:
    return CheckpointError(
        name,
        expected="the same on every rank that holds it",
        got=f"{first} on rank {first_rank} and {second} on rank {second_rank}",
    )


def _show(value: Value) -> str:
    text = value.text if len(value.text) < 200 else value.text[:197] + "…"  # noqa: PLR2004  # two lines of text
    return text if value.module is None else f"{text} (owned by {value.module})"
