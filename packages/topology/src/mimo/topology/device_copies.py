"""Copies to a device for which neither the host waits nor the device stands still."""

from __future__ import annotations

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
