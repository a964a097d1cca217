"""Shared values cannot change, and a `Stateful` part is known by its shape."""

from __future__ import annotations

import attrs
import pytest

from mimo.hooks import Common, ItemInfo, Owned, Stateful


def test_hooks_values_are_frozen_and_compare_by_content() -> None:
    """An item's info cannot be changed, only replaced."""
    info = ItemInfo(sample=3, index=0, modality="image", size=(8, 6))
    assert info == ItemInfo(sample=3, index=0, modality="image", size=(8, 6))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        info.sample = 4  # type: ignore[misc]


def test_hooks_values_take_only_named_arguments() -> None:
    """Four numbers in a row would not say what they are."""
    with pytest.raises(TypeError, match="positional"):
        ItemInfo(3, 0, "image", (8, 6))  # type: ignore[call-arg]


def test_hooks_values_distinguish_common_from_owned_leaves() -> None:
    """The same value is another leaf when one module owns it."""
    leaves: list[object] = [Common(1), Owned(1, "vision"), Owned(1, "language")]
    assert leaves[0] != leaves[1]
    assert leaves[1] != leaves[2]


def test_hooks_values_know_a_stateful_part_by_its_shape() -> None:
    """Nobody has to inherit from `Stateful`."""

    class Part:
        name = "part"

        def state(self) -> dict[str, int]:
            return {}

        def load(self, tree: dict[str, int]) -> None: ...

    assert isinstance(Part(), Stateful)
    assert not isinstance(object(), Stateful)
