"""All items of a step go to the device in one copy, from a buffer that is not written while it is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from mimo.trainer.items.packing import describe, packed_bytes, read_items, write_items
from mimo.trainer.items.prepared import Item
from mimo.trainer.items.staging import StagedItem, StagedStep, Staging

CPU = torch.device("cpu")


@attrs.define(eq=False)
class HeldCopier:
    """A device whose copies are done when somebody waits for them; it notes what it is asked for, in order."""

    asked: list[str] = attrs.field(factory=list)
    pending: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    def begin_thread(self) -> None:
        """Nothing differs between threads here."""

    def pinned(self, count: int) -> Tensor:
        self.asked.append(f"pin {count}")
        return torch.zeros(count, dtype=torch.uint8)

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        self.asked.append(f"send {len(source)}")
        self.pending.append((torch.full_like(source, 255), source))
        return self.pending[-1][0], Reached(self)

    def receive(self, _sent: Tensor, event: Any) -> None:
        self.asked.append("receive")
        event.copy()


@attrs.frozen
class Reached:
    """An event after a copy."""

    copier: HeldCopier

    def synchronize(self) -> None:
        self.copier.asked.append("wait")
        self.copy()

    def copy(self) -> None:
        for target, source in self.copier.pending:
            target.copy_(source)
        self.copier.pending.clear()


def an_item(number: int) -> Item:
    """Return an item of uneven tensors, one of them not contiguous and one empty."""
    return {
        "pixels": torch.arange(6.0).view(2, 3).T + number,
        "mask": torch.arange(number) % 2 == 0,
        "half": torch.full((3,), number, dtype=torch.bfloat16),
        "none": torch.empty(0, 2),
        "count": torch.tensor(number),
    }


def same(left: Item, right: Item) -> bool:
    """Return whether two items are the same in every bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def step_of(staging: Staging, count: int) -> tuple[StagedStep, list[Callable[[], StagedItem]]]:
    """Return a step, and what prepares each of its items."""
    step = StagedStep(staging)
    for _ in range(count):
        step.expect()
    step.all_known()
    return step, [partial(step.prepare, partial(an_item, number)) for number in range(count)]


def test_items_are_read_from_bytes_as_they_were_written() -> None:
    """Each tensor begins where its elements can be read; what is too short is refused."""
    items = [an_item(number) for number in range(4)]
    described = [describe(item) for item in items]
    buffer = torch.zeros(packed_bytes(described) + 5, dtype=torch.uint8)
    write_items(buffer, items)
    found = read_items(buffer, described)
    assert all(map(same, found, items))
    assert all(not tensor.data_ptr() % tensor.itemsize for item in found for tensor in item.values())
    with pytest.raises(ValueError, match=f"expected {packed_bytes(described)} bytes of items, got 16"):
        read_items(buffer[:16], described)
    with pytest.raises(AssertionError, match="too small"):
        write_items(buffer[:16], items)


def test_a_step_is_copied_once_when_its_last_item_is_there() -> None:
    """Whatever their order; what computes waits for the copy once, and what was on the host is let go."""
    copier = HeldCopier()
    _, prepare = step_of(Staging(copier, max_bytes=1 << 20), 3)
    last, first = prepare[2](), prepare[0]()
    assert copier.asked == []
    middle = prepare[1]()
    size = packed_bytes([describe(an_item(number)) for number in range(3)])
    assert copier.asked == [f"pin {2 * size}", f"send {size}"]
    assert [item.host for item in (first, middle, last)] == [None] * 3
    assert all(same(item.take(), an_item(number)) for number, item in enumerate((first, middle, last)))
    assert copier.asked[2:] == ["receive"]


def test_the_buffer_is_written_again_only_after_it_has_been_copied() -> None:
    """The first step keeps its bytes; the buffer grows where a step needs more."""
    copier = HeldCopier()
    staging = Staging(copier, max_bytes=1 << 20)
    steps = [[make() for make in step_of(staging, count)[1]] for count in (2, 3, 9)]
    assert [word.split()[0] for word in copier.asked] == ["pin", "send", "wait", "send", "wait", "pin", "send"]
    assert all(same(item.take(), an_item(number)) for step in steps for number, item in enumerate(step))


def test_an_item_that_is_needed_early_is_where_it_was_prepared() -> None:
    """And so are the others of its step, which nothing waits for."""
    copier = HeldCopier()
    _, prepare = step_of(Staging(copier, max_bytes=1 << 20), 2)
    first = prepare[0]()
    assert same(first.take(), an_item(0))
    assert same(prepare[1]().take(), an_item(1))
    assert copier.asked == []


@pytest.mark.parametrize("fails", [0, 2])
def test_an_item_that_cannot_be_prepared_leaves_the_others_to_be_sent(fails: int) -> None:
    """Its error is raised where it is prepared, also by the last."""
    copier = HeldCopier()
    step, prepare = step_of(Staging(copier, max_bytes=1 << 20), 3)

    def torn() -> Item:
        raise OSError("torn")

    found = list[StagedItem]()
    for number in range(3):
        if number == fails:
            with pytest.raises(OSError, match="torn"):
                step.prepare(torn)
        else:
            found.append(prepare[number]())
    assert [word.split()[0] for word in copier.asked] == ["pin", "send"]
    assert all(same(item.take(), an_item(number)) for item, number in zip(found, {0, 1, 2} - {fails}, strict=True))


def test_a_step_that_has_no_room_is_not_sent() -> None:
    """In the pinned memory that may be had: its items stay where they are."""
    copier = HeldCopier()
    _, prepare = step_of(Staging(copier, max_bytes=16), 2)
    found: Sequence[StagedItem] = [make() for make in prepare]
    assert all(same(item.take(), an_item(number)) for number, item in enumerate(found))
    assert copier.asked == []


def test_a_step_without_items_sends_nothing() -> None:
    """As of text alone."""
    copier = HeldCopier()
    StagedStep(Staging(copier, max_bytes=16)).all_known()
    assert copier.asked == []


def test_nothing_is_copied_where_the_host_computes() -> None:
    """Items are used where they were prepared."""
    assert Staging.to(CPU, ahead_bytes=1 << 30) is None
