"""Boxes of a tensor: whether pieces lie inside it and cover it exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one to the next along each dim, the last dim fastest."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    def find(self, place: Sequence[int]) -> int:
        """Return how many of its elements come before the one at ``place``, an index of the tensor."""
        return sum((at - low) * stride for at, low, stride in zip(place, self.offset, self.strides, strict=True))

    def slices(self, outer: Box) -> tuple[slice, ...]:
        """Return what of ``outer`` this box is, as an index."""
        return tuple(
            slice(low - start, low - start + size)
            for low, start, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def boxes_between(box: Box, low: int, high: int) -> Iterator[Box]:
    """Yield boxes that make up the elements of ``box`` from ``low`` to ``high``, the last dim fastest; in any order."""
    if low >= high:
        return
    if not box.shape:
        yield box
        return
    top, inner = box.offset[0], Box(box.offset[1:], box.shape[1:])
    each = inner.elements
    first, last = -(-low // each), high // each
    if first > last:  # all in one row
        parts = [(last, low - last * each, high - last * each)]
    else:  # whole rows, the end of the one before them, the beginning of the one after
        if first < last:
            yield Box((top + first, *inner.offset), (last - first, *inner.shape))
        parts = [(first - 1, low - (first - 1) * each, each), (last, 0, high - last * each)]
    for row, begin, end in parts:
        for part in boxes_between(inner, begin, end):
            yield Box((top + row, *part.offset), (1, *part.shape))


def intersect(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common, None for nothing."""
    lows = tuple(max(low, other_low) for low, other_low in zip(one.offset, other.offset, strict=True))
    highs = tuple(
        min(low + size, other_low + other_size)
        for low, size, other_low, other_size in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    shape = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return Box(lows, shape) if all(size > 0 for size in shape) else None


def covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether ``boxes`` lie inside a tensor of ``shape`` and hold each of its elements exactly once."""
    if len(boxes) == 1:
        return boxes[0] == Box((0,) * len(shape), tuple(shape))
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
    # Sweep along the dim that separates most boxes; only those open at the same place are compared.
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
