"""Copies to a device by way of page-locked memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mimo.topology.device_copies import all_to_device, to_device


def test_what_is_there_already_is_not_copied() -> None:
    """Nor converted without need."""
    x = torch.ones(3)
    assert to_device(x, "cpu") is x
    assert to_device(x, torch.device("cpu"), torch.float32) is x
    assert to_device(x, "cpu", torch.float64).dtype == torch.float64


def test_a_tensor_without_numbers_needs_no_memory_to_come_from() -> None:
    """On the meta device, where shapes are worked out on machines without accelerators."""
    found = to_device(torch.ones(3), "meta", torch.bfloat16)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.bfloat16, (3,))


def test_an_accelerator_copies_from_page_locked_memory_when_it_is_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host converts first, as the copy would otherwise come from memory that is not page-locked."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def noted(name: str) -> Any:
        def call(x: Tensor, *args: Any, **how: Any) -> Tensor:
            calls.append((name, args, how))
            return x

        return call

    monkeypatch.setattr(Tensor, "pin_memory", noted("pin_memory"))
    with patch.object(Tensor, "to", noted("to")):
        to_device(torch.ones(3), "cuda:1", torch.bfloat16)
    assert calls == [
        ("to", (), {"dtype": torch.bfloat16}),
        ("pin_memory", (), {}),
        ("to", (torch.device("cuda:1"),), {"non_blocking": True}),
    ]


def test_many_tensors_go_to_an_accelerator_in_one_copy_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its shape and numbers, empty ones too; those that are there already are not copied."""
    tensors = [torch.arange(6).view(2, 3), torch.ones(4), torch.zeros(0, dtype=torch.long), torch.arange(5)]
    copied: list[Tensor] = []

    def pin_memory(x: Tensor) -> Tensor:
        copied.append(x)
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    with patch.object(Tensor, "to", lambda x, *_args, **_how: x):
        found = all_to_device(tensors, "cuda:1")
    assert [(x.dtype, x.numel()) for x in copied] == [(torch.int64, 11), (torch.float32, 4)]
    for x, y in zip(tensors, found, strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    assert all(x is y for x, y in zip(tensors, all_to_device(tensors, "cpu"), strict=True))
    assert all_to_device([], "cuda:1") == []
