"""Which kernel attention runs on."""

from __future__ import annotations

from enum import Enum

import torch

from mimo.model.attention.varlen import WIDEST, takes_varlen


class Kernel(Enum):
    """What computes attention."""

    VARLEN = "one call without padding"
    FUSED = "calls of `scaled_dot_product_attention`, padded"
    MATH = "the same calls, by the kernel that writes down all scores"
    STEPWISE = "products and softmax one by one, padded"


def kernel_of(
    device: torch.device, dtype: torch.dtype, *, widths: tuple[int, int], scored: bool, items: bool
) -> Kernel:
    """Return what computes attention there.

    Args:
        device: where.
        dtype: of queries, keys and values; no fused kernel of CUDA takes float64.
        widths: of a head's keys, and of its values; the fused kernel of CPUs takes equal ones alone. Filled up, it is
            slower there than the one that writes down all scores up to 512 rows in fp32, and from 32 rows on in bf16.
        scored: whether scores are capped or take sinks, which no kernel does.
        items: whether rows of an item see later ones, which the kernel without padding can't.
    """
    if scored or (device.type == "cuda" and dtype == torch.float64):
        return Kernel.STEPWISE
    if takes_varlen(device, dtype) and max(widths) <= WIDEST and not items:
        return Kernel.VARLEN
    return Kernel.MATH if device.type == "cpu" and widths[0] != widths[1] else Kernel.FUSED
