"""What a rank computes on, named so that the same hardware has the same name in another process, job or order."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from mimo.launch.process.process_info import ProcessInfo

_MACHINE_ID = Path("/etc/machine-id")


def device_identity(place: ProcessInfo, given: str | tuple[str, ...]) -> str:
    """Return the identity of a rank's device: a GPU's UUID; of a CPU its host, and which process of the host it is.

    Args:
        place: the rank.
        given: what stands for it by settings: one text for a machine, or one for each rank; empty for none.
    """
    if isinstance(given, tuple):
        return given[place.rank]
    if given:
        return f"{given}/{place.local_rank}"
    if place.device.startswith("cuda"):
        return f"gpu {torch.cuda.get_device_properties(torch.device(place.device)).uuid}"
    machine = _MACHINE_ID.read_text(encoding="utf-8").strip() if _MACHINE_ID.is_file() else ""
    return " ".join(filter(None, ["cpu", platform.node(), machine, str(place.local_rank)]))
