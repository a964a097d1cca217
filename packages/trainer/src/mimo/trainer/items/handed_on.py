"""Items that the ranks of a lane decode once between them: each hands its share on to the others.

They meet in the forward that needs the items, which all run in the same order: nothing is sent beside it, so that
no collective of theirs can overtake another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mimo.data import PlacedItem
from mimo.hooks import ItemInfo, UserError
from mimo.topology.collectives import all_gather_json, all_gather_single
from mimo.trainer.items.faults import fault_of, fields_of
from mimo.trainer.items.packing import describe, packed_bytes, read_items, write_items
from mimo.trainer.items.prepared import Item

_LEAST = 16
"""Bytes of a message at least: none is empty."""


def is_handed_on(items: Sequence[PlacedItem], bound: int) -> bool:
    """Return whether ranks decode the items of a microbatch once between them: where there is enough to decode.

    Args:
        items: that all of them take.
        bound: pixels, frames, or whatever sizes of items count, from which it is.
    """
    return bool(items) and sum(prod(item.info.size) for item in items) >= bound


def decoder_of(info: ItemInfo, ranks: int) -> int:
    """Return which of so many ranks decodes an item."""
    return (info.sample + info.index) % ranks


def hand_on(
    own: Mapping[int, Item],
    fault: UserError | None,
    *,
    groups: Iterable[dist.ProcessGroup],
    device: torch.device,
) -> Mapping[int, Item]:
    """Return all items of a pass by number; collective in each group, one after the other.

    Args:
        own: what this rank has decoded, each number on one rank only.
        fault: why it can't decode one of its own.
        groups: in which ranks meet: those of each axis over which a lane has several.
        device: where items lie.

    Raises:
        DataError: one of the ranks has a fault; the same on all, but for those that have their own.
    """
    items, said = dict(own), None if fault is None else fields_of(fault)
    for group in groups:
        header = {"fault": said, "items": [[number, describe(item)] for number, item in sorted(items.items())]}
        headers: list[Any] = all_gather_json(header, group)
        said = next((other["fault"] for other in headers if other["fault"] is not None), None)
        # Where one has a fault nobody sends, but all meet the ranks of the next group, who don't know of it.
        if said is None:
            items = _exchange(items, [other["items"] for other in headers], group, device)
    if fault is not None:
        raise fault
    if said is not None:
        raise fault_of(said)
    return items


def _exchange(
    items: Mapping[int, Item], described: Sequence[Any], group: dist.ProcessGroup, device: torch.device
) -> dict[int, Item]:
    sizes = [packed_bytes([item for _, item in one]) for one in described]
    mine = torch.zeros(max(*sizes, _LEAST), dtype=torch.uint8, device=device)
    write_items(mine, [item for _, item in sorted(items.items())])
    gathered = mine.new_empty(len(sizes), len(mine))
    all_gather_single(gathered, mine, group)
    found: dict[int, Item] = {}
    for row, one in zip(gathered, described, strict=True):
        numbers = [number for number, _ in one]
        found |= dict(zip(numbers, read_items(row, [item for _, item in one]), strict=True))
    return found
