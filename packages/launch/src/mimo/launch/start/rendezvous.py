"""How the processes of a run meet: where each computes, and by what backend they send."""

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
class Meeting:
    """What `launch` can be handed by a program that wants its processes to meet in another way than the usual.

    To reach fresh interpreters, both must be functions that can be pickled.

    Args:
        device: of what a run computes on, ``cpu`` or ``cuda``, and the number of a process on this machine: where it
            computes.
        backend: of where a process computes: the backend of its default group, as `init_process_group` takes it. It is
            called in each process before that group is made, and may register what it names.
    """

    device: Callable[[str, int], str] = own_device
    backend: Callable[[str], str] = usual_backend
