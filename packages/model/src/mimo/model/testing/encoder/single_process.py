"""Checks of an encoder in one process: what it says of sizes, and what its module computes from items."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mimo.model.spec import Stage
from mimo.model.testing.checks import BrokenError, SkippedError
from mimo.model.testing.compare import compare_gradients, compare_rows
from mimo.model.testing.encoder.subject import ModuleLayout, Subject
from mimo.model.testing.modules import ItemSubject, check_frozen

_LEFT_OUT = 0.05
"""Share of the weights that a formula of costs may leave out, such as norms."""


def check_measure(subject: ItemSubject) -> None:
    """measure() returns an item's size as whole numbers, the same each time."""
    for index, raw in enumerate(subject.raw):
        size = subject.spec.measure(raw)
        if not isinstance(size, tuple) or not all(type(side) is int for side in size):
            raise BrokenError(f"of item {index} it returned {size!r}, not a tuple of whole numbers")
        if subject.spec.measure(raw) != size:
            raise BrokenError(f"of item {index} it returned {size!r}, and then {subject.spec.measure(raw)!r}")


def check_prepare(subject: ItemSubject) -> None:
    """prepare() returns tensors by name, the same each time, and leaves the item as it was."""
    for index, (raw, size) in enumerate(zip(subject.raw, subject.sizes(), strict=True)):
        with _about(index, size):
            first, second = subject.spec.prepare(subject.config, raw), subject.spec.prepare(subject.config, raw)
        if not isinstance(first, Mapping):
            raise BrokenError(f"of item {index} it returned {type(first).__name__}, not a mapping of tensors by name")
        for name, value in first.items():
            if not isinstance(value, Tensor):
                raise BrokenError(f"of item {index} {name!r} is {type(value).__name__}, not a tensor")
        for name, value in first.items():
            if name not in second or not torch.equal(value, second[name]):
                raise BrokenError(f"of item {index} {name!r} differs from one call to the next")
        if subject.spec.measure(raw) != size:
            raise BrokenError(f"item {index} had size {size}, and {subject.spec.measure(raw)} after it")


def check_build(subject: Subject) -> None:
    """The module can be built, without layers whose result would depend on the layout."""
    subject.build()


def check_rows(subject: Subject) -> None:
    """forward() returns as many rows of an item as rows() says, each of the width that is asked for."""
    built = subject.build()
    for index, (item, size, count) in enumerate(zip(subject.items(), subject.sizes(), subject.counts(), strict=True)):
        if type(count) is not int or count < 0:
            raise BrokenError(f"rows() of size {size} is {count!r}, not a whole number from 0")
        grid = None if subject.spec.grid is None else subject.spec.grid(subject.config, size)
        if grid is not None and math.prod(grid) != count:
            raise BrokenError(f"grid() of size {size} is {grid}, rows() {count}")
        with _about(index, size):
            made = built.encode([item], [size])
        if (found := tuple(made.shape)) != (count, subject.hidden):
            raise BrokenError(
                f"item {index} of size {size} became a tensor of shape {found}, expected {(count, subject.hidden)}"
            )


def check_items(subject: Subject) -> None:
    """forward() leaves the items that it is given as they were."""
    items, copies = subject.items(), subject.items()
    subject.build().encode(items, subject.sizes())
    for index, (item, before) in enumerate(zip(items, copies, strict=True)):
        changed = [name for name in before if name not in item or not torch.equal(item[name], before[name])]
        if changed or len(item) > len(before):
            name = (changed or sorted(item.keys() - before.keys()))[0]
            raise BrokenError(f"it changed {name!r} of item {index}; work on a copy, as another call may read it too")


def check_empty(subject: Subject) -> None:
    """forward() of no items returns no rows, and where they have a backward it works."""
    found = subject.build().encode([], [])
    if tuple(found.shape) != (0, subject.hidden):
        raise BrokenError(f"it returned a tensor of shape {tuple(found.shape)}, expected {(0, subject.hidden)}")
    if found.requires_grad:
        found.sum().backward()


def check_alone(subject: Subject) -> None:
    """An item's rows don't depend on the items beside it, nor on their order."""
    built, items, sizes = subject.build(), subject.items(), subject.sizes()
    single = [built.encode([item], [size]).detach() for item, size in zip(items, sizes, strict=True)]
    compare_rows(built.encode(items, sizes), torch.cat(single), "rows of all items at once", "those of one at a time")
    turned = built.encode(items[::-1], sizes[::-1])
    compare_rows(turned, torch.cat(single[::-1]), "rows of the items in another order", "those of one at a time")


def check_memory(subject: Subject) -> None:
    """A call leaves nothing behind that another one sees."""
    built, items, sizes = subject.build(), subject.items(), subject.sizes()
    before = built.buffers
    first = built.encode(items[:1], sizes[:1]).detach()
    built.learn(items[1:], sizes[1:])
    compare_rows(built.encode(items[:1], sizes[:1]), first, "rows of item 0 after other items", "those before")
    for name, value in built.buffers.items():
        if not torch.equal(value, before[name]):
            raise BrokenError(f"buffer {name!r} changed in forward")


def check_lanes(subject: Subject) -> None:
    """Two lanes, each with a part of the items, learn together what one learns."""
    whole, halves = subject.build(), subject.build()
    items, sizes, weights = subject.items(), subject.sizes(), _weights(subject)
    (whole.encode(items, sizes) * weights).sum().backward()
    middle = len(items) // 2
    first = sum(subject.counts()[:middle])
    (halves.encode(items[:middle], sizes[:middle]) * weights[:first]).sum().backward()
    (halves.encode(items[middle:], sizes[middle:]) * weights[first:]).sum().backward()
    compare_gradients(halves.gradients(), whole.gradients())


def check_types(subject: Subject) -> None:
    """With bf16 weights and items, rows are bf16, those of no items too."""
    built = subject.build(ModuleLayout(dtype=torch.bfloat16))
    rows = built.encode(subject.items(torch.bfloat16), subject.sizes())
    if rows.dtype != torch.bfloat16:
        raise BrokenError(f"rows are {rows.dtype}; keep buffers and made tensors in the type of what they meet")
    empty = built.encode([], [])
    if empty.dtype != torch.bfloat16:
        raise BrokenError(f"rows of no items are {empty.dtype}")


def check_parts(subject: Subject) -> None:
    """A frozen part gets no gradient, and the others still do."""
    if not subject.spec.parts:
        raise SkippedError("the spec names no parts")
    check_frozen(subject, subject.spec.parts)


def check_costs(subject: Subject) -> None:
    """flops() counts the weights, and more arithmetic for more items."""
    if subject.spec.flops is None:
        raise SkippedError("the spec has no flops")
    sizes = subject.sizes()
    one, all_of_it = (
        list(subject.spec.flops(subject.config, subject.hidden, Stage(), "none", found).values())
        for found in (sizes[:1], sizes)
    )
    counted, held = sum(work.weights for work in all_of_it), sum(p.numel() for p in subject.build().parameters.values())
    if abs(counted - held) > _LEFT_OUT * held:
        raise BrokenError(f"it counts {counted:,} weights, the module has {held:,}")
    if not sum(work.forward for work in all_of_it) > sum(work.forward for work in one) > 0:
        raise BrokenError("items beside the first take no arithmetic")


@contextmanager
def _about(index: int, size: tuple[int, ...]) -> Iterator[None]:
    """Tell of an error inside which item it was about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"with item {index} of size {size}")
        raise


def _weights(subject: Subject) -> Tensor:
    return torch.randn(sum(subject.counts()), subject.hidden, generator=torch.Generator().manual_seed(7))
