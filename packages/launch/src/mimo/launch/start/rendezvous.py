"""How the processes of a run join: the device of each, and the backend of their default group."""

from __future__ import annotations

from collections.abc import Callable

import attrs


def own_device(device: str, local_rank: int) -> str:
    """Return ``cuda:<local_rank>``, so that no two processes share a GPU; ``cpu`` as it is."""
    return f"{device}:{local_rank}" if device == "cuda" else device


def usual_backend(device: str) -> str:
    """Return NCCL for what lies on a GPU, gloo for host memory."""
    return "nccl" if device.startswith("cuda") else "gloo"


@attrs.frozen(kw_only=True)
class Rendezvous:
    """Devices and backend of the processes that `launch` starts, for programs that need others than the usual.

    To reach fresh interpreters, both must be functions that can be pickled.

    Args:
        device: returns the device of a process, given ``cpu`` or ``cuda`` and the number of the process on its machine.
        backend: returns the backend of a process's default group, as `init_process_group` takes it, given its device.
            It is called in each process before that group is made, and may register the backend that it names.
    """

    device: Callable[[str, int], str] = own_device
    backend: Callable[[str], str] = usual_backend
