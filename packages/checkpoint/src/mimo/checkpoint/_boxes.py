"""Boxes of a tensor: whether pieces lie inside it and cover it exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Box:
    """A box of a tensor: where it begins and how long it is along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Tell whether ``boxes`` lie inside a tensor of ``shape`` and hold each of its elements exactly once."""
    inside = all(
        len(box.offset) == len(box.shape) == len(shape)
        and all(
            low >= 0 and 0 <= size <= whole - low for low, size, whole in zip(box.offset, box.shape, shape, strict=True)
        )
        for box in boxes
    )
    return inside and sum(box.elements for box in boxes) == math.prod(shape) and not _any_overlap(len(shape), boxes)


def _any_overlap(dims: int, boxes: Sequence[Box]) -> bool:
    full = [box for box in boxes if box.elements]
    if not dims:
        return len(full) > 1
    # Sweep along the dim that tells most boxes apart; only those open at the same place are compared.
    sweep = max(range(dims), key=lambda dim: len({box.offset[dim] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda box: box.offset[sweep]):
        active = [other for other in active if other.offset[sweep] + other.shape[sweep] > box.offset[sweep]]
        if any(_overlap(box, other) for other in active):
            return True
        active.append(box)
    return False


def _overlap(one: Box, other: Box) -> bool:
    return all(
        low < other_low + other_size and other_low < low + size
        for low, size, other_low, other_size in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
