"""Tensors that carry an object through a compiled graph, which takes and saves nothing but tensors.

What is carried lives as long as the tensor's memory: as long as the graph saves it, and no longer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class _Carried(bytearray):
    """Memory of a tensor, and what it carries."""

    content: Any = None


_carried: weakref.WeakValueDictionary[int, _Carried] = weakref.WeakValueDictionary()
"""By address of the memory."""


class ForGraphs:
    """What a compiled layer may be given, in a form that graphs take."""

    __slots__ = ()

    def for_graphs(self) -> object | None:
        """Return that form, of plain values and tensors that `carry`; None where the layer is to run eagerly."""
        raise NotImplementedError


def carry(content: object, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a tensor of one element, on the CPU, that carries ``content``.

    Args:
        content: must not hold the tensor itself: nobody would see that circle.
        dtype: of the tensor.
    """
    memory = _Carried(dtype.itemsize)
    memory.content = content
    carrier = torch.frombuffer(memory, dtype=dtype)
    _carried[carrier.data_ptr()] = memory
    return carrier


def content_of(carrier: Tensor) -> Any:
    """Return what a tensor carries."""
    return _carried[carrier.data_ptr()].content
