"""Copies to a device for which neither the host waits nor the device stands still."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, in a ``dtype`` if one is given: itself if it is there already.

    What lies in the memory of the host goes by way of page-locked memory, from which an accelerator copies when it is
    its turn. From other memory a copy may first wait until the accelerator has done all that it was given before.
    """
    device = torch.device(device)
    if device.type in {"cpu", "meta"} or x.device.type != "cpu":
        return x.to(device, dtype)
    return x.to(dtype=dtype).pin_memory().to(device, non_blocking=True)


def all_to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return tensors on a device as `to_device` does, with one copy for all those of a dtype; they then share memory.

    For many small ones, of which each copy takes the host longer than the device.

    Args:
        tensors: of any shapes, all in the memory of the host or all on the device.
        device: where they go.
    """
    device = torch.device(device)
    if device.type in {"cpu", "meta"} or any(one.device.type != "cpu" for one in tensors):
        return [to_device(one, device) for one in tensors]
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        same = [number for number, one in enumerate(tensors) if one.dtype == dtype]
        whole = to_device(torch.cat([tensors[number].flatten() for number in same]), device)
        for number, part in zip(same, whole.split([tensors[number].numel() for number in same]), strict=True):
            found[number] = part.view(tensors[number].shape)
    return [found[number] for number in range(len(tensors))]
