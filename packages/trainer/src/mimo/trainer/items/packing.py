"""Items as one row of bytes, and back: tensors one after the other, each where any of its elements can be read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mimo.trainer.items.prepared import Item

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ALIGNED = 16
"""Bytes at whose multiples tensors begin."""


def describe(item: Item) -> list[Any]:
    """Return as JSON data what `read_items` needs to know of an item: of each tensor name, dtype and shape."""
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(item.items())]


def packed_bytes(described: Sequence[Any]) -> int:
    """Return the bytes that items take, of which `describe` returned these."""
    return sum(_room(dtype, shape) for item in described for _, dtype, shape in item)


def write_items(target: Tensor, items: Sequence[Item]) -> None:
    """Write items one after the other.

    Args:
        target: uint8 ``[B]``, of at least `packed_bytes`, on the device of the items or in host memory beside them.
        items: their tensors may lie in any layout.
    """
    described = [describe(item) for item in items]
    assert packed_bytes(described) <= len(target), "a buffer that is too small for these items"
    at = 0
    for item in items:
        for _, tensor in sorted(item.items()):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            target[at : at + len(raw)] = raw
            at += _room(str(tensor.dtype), tensor.shape)


def read_items(source: Tensor, described: Sequence[Any]) -> list[Item]:
    """Return items that `write_items` has written, as views of the bytes.

    Args:
        source: uint8 ``[B]``.
        described: what `describe` returned of each.

    Raises:
        ValueError: there are fewer bytes than these items take.
    """
    if packed_bytes(described) > len(source):
        msg = f"expected {packed_bytes(described)} bytes of items, got {len(source)}"
        raise ValueError(msg)
    found, at = list[Item](), 0
    for described_item in described:
        item: dict[str, Tensor] = {}
        for name, dtype, shape in described_item:
            count = prod(shape) * _DTYPES[dtype].itemsize
            item[name] = source[at : at + count].view(_DTYPES[dtype]).view(shape)
            at += _room(dtype, shape)
        found.append(item)
    return found


def _room(dtype: str, shape: Sequence[int]) -> int:
    return -(-prod(shape) * _DTYPES[dtype].itemsize // _ALIGNED) * _ALIGNED
