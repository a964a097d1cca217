"""What is held at the highest moment, by kind and module: by labels, and by who made and freed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from mimo.schedule import Action, ActionKind
from mimo.schedule.runtime import Record
from mimo.trainer.memory.tracker import Labels, MemoryTracker

COUNT = 250
BYTES = 4 * COUNT
ACTIONS = tuple(
    Action(kind=kind, module="language", stage=0, microbatches=() if kind == "reduce" else (0,))
    for kind in ("forward", "backward", "reduce")
)


def zeros() -> Tensor:
    """Return a tensor of its own storage."""
    return torch.zeros(COUNT)


def measured(*steps: Callable[[], object], labels: Callable[[], Labels] = list) -> Mapping[str, Mapping[str, int]]:
    """Return what is held at the peak of a forward, a backward and a reduction that do these steps."""
    record = Record()
    with MemoryTracker(record, labels) as tracker:
        for action, step in zip(ACTIONS, steps, strict=False):
            step()
            record.add(action, began=0, ready=0, ended=0)
        torch.empty(0)  # so that the last changes are seen
    found: Mapping[str, Mapping[str, int]] = tracker.peak(ACTIONS).modules
    return found


def test_what_one_action_makes_and_frees_is_working_memory() -> None:
    """The rest of a forward are activations, of which one that is freed counts no longer."""
    saved: list[Tensor] = []

    def forward() -> None:
        saved.append(zeros())
        zeros() + zeros()  # both operands and the sum at once

    assert measured(forward) == {"language": {"activations": BYTES, "working": 3 * BYTES}}

    def backward() -> None:
        saved.clear()
        kept = [zeros() for _ in range(3)]
        kept.clear()

    saved.clear()
    assert measured(lambda: saved.append(zeros()), backward) == {"language": {"working": 3 * BYTES}}


def test_what_has_no_memory_counts_for_nothing() -> None:
    """As of modules that are made to see what they would take."""
    kept: list[Tensor] = []
    assert measured(lambda: kept.extend([zeros(), torch.zeros(COUNT, device="meta") * 2])) == {
        "language": {"activations": BYTES}
    }


def test_what_a_backward_leaves_is_a_gradient_or_a_message() -> None:
    """By whether the reduction frees it, or the action after it does."""
    left: list[Tensor] = []

    def backward() -> None:
        left.extend([zeros(), zeros()])
        zeros()

    for free in (left.clear, list):
        left.clear()
        assert measured(list, backward, free) == {"language": {"gradients": 2 * BYTES, "working": BYTES}}
    actions: list[ActionKind] = ["backward", "send"]
    record = Record()
    with MemoryTracker(record, list) as tracker:
        sent = [zeros()]
        record.add(ACTIONS[1], began=0, ready=0, ended=0)
        zeros()
        sent.clear()
    assert tracker.peak(
        [Action(kind=kind, module="vision", stage=0, microbatches=(0,)) for kind in actions]
    ).modules == {"vision": {"messages": BYTES, "working": BYTES}}


def test_labels_come_before_actions() -> None:
    """What was there before without one belongs to no module; a view or what an operation changes is nothing new."""
    weight, batch = zeros(), zeros()
    state: list[Tensor] = []

    def labels() -> Labels:
        yield "weights", "language", weight
        yield from (("optimizer", "language", one) for one in state)

    def forward() -> None:
        batch.view(-1).add_(weight)
        state.append(zeros())

    found = measured(forward, labels=labels)
    assert found == {"language": {"weights": BYTES, "optimizer": BYTES}, "": {"other": BYTES}}


@pytest.mark.parametrize("size", [0, COUNT])
def test_storages_that_grow_are_gathered(size: int) -> None:
    """As FSDP2 frees and takes storages of tensors that stay."""
    gathered = torch.zeros(COUNT)
    gathered.untyped_storage().resize_(4 * size)

    def forward() -> None:
        gathered.untyped_storage().resize_(2 * BYTES)
        gathered.add_(1)
        gathered.untyped_storage().resize_(BYTES)

    found = measured(lambda: gathered.detach() if size else gathered.view(-1), forward)
    assert found["language"] == {"gathered": 2 * BYTES}
