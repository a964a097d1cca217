"""The identity of a rank's device: the same hardware has the same one in another process, job or order."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from mimo.launch.process.process_info import ProcessInfo

_MACHINE_ID = Path("/etc/machine-id")


def device_identity(process: ProcessInfo, given: str | tuple[str, ...]) -> str:
    """Return the identity of a rank's device: a GPU's UUID; of a CPU its host, and which process of the host it is.

    Args:
        process: the rank.
        given: the identity that settings give: one text for a machine, or one for each rank; empty for none.
    """
    if isinstance(given, tuple):
        return given[process.rank]
    if given:
        return f"{given}/{process.local_rank}"
    if process.device.startswith("cuda"):
        return f"gpu {torch.cuda.get_device_properties(torch.device(process.device)).uuid}"
    machine = _MACHINE_ID.read_text(encoding="utf-8").strip() if _MACHINE_ID.is_file() else ""
    return " ".join(filter(None, ["cpu", platform.node(), machine, str(process.local_rank)]))
