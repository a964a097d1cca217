"""Which process of a run this is: its rank, its machine's share of ranks, its device and its heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import ConfigError
from mimo.launch.process.heartbeat import Heartbeat
from mimo.launch.process.slurm import as_torchrun, is_task, number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@attrs.frozen(kw_only=True)
class ProcessInfo:
    """One process of a run.

    Args:
        rank: 0 to ``world - 1``.
        world: number of processes.
        local_rank: its number among the processes of this machine.
        device: where it computes, ``cpu`` or ``cuda:<index>``, counted among the GPUs that it sees.
        heartbeat: what it does now.
        objects: the group of all ranks for objects and barriers, which lie on no device; None: the default group.
    """

    rank: int
    world: int
    local_rank: int
    device: str = "cpu"
    heartbeat: Heartbeat = attrs.field(factory=Heartbeat, eq=False, repr=False)
    objects: ProcessGroup | None = attrs.field(default=None, eq=False, repr=False)


def with_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with torchrun's names, taken from Slurm's for a task that srun started beside others.

    Raises:
        ConfigError: naming the variable of Slurm that is missing or can't be read.
    """
    return environ if is_joining(environ) or not is_task(environ) else {**environ, **as_torchrun(environ)}


def is_joining(environ: Mapping[str, str]) -> bool:
    """Return whether somebody else, such as torchrun, started this process as one of several."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def process_from(environ: Mapping[str, str], device: str, *, gpus: int = 0) -> ProcessInfo:
    """Return the process that the environment describes.

    Args:
        environ: with ``RANK`` and ``WORLD_SIZE``.
        device: ``cpu`` or ``cuda``.
        gpus: how many this process sees. One is its own, whatever the number of the process on this machine is.

    Raises:
        ConfigError: one of them is not a number.
    """
    rank, world = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    local_rank = number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    index = 0 if gpus == 1 else local_rank
    return ProcessInfo(
        rank=rank, world=world, local_rank=local_rank, device=f"cuda:{index}" if device == "cuda" else device
    )


def local_world(environ: Mapping[str, str], world: int) -> int:
    """Return how many of ``world`` processes share this machine."""
    return number(environ, "LOCAL_WORLD_SIZE") if is_joining(environ) and "LOCAL_WORLD_SIZE" in environ else world


def ranks_of_machine(environ: Mapping[str, str], world: int) -> int:
    """Return how many of ``world`` processes each machine will run: all, unless ``LOCAL_WORLD_SIZE`` says otherwise.

    Raises:
        ConfigError: it is not a number of at least 1.
    """
    if "LOCAL_WORLD_SIZE" not in environ:
        return world
    count = number(environ, "LOCAL_WORLD_SIZE")
    if not count:
        raise ConfigError("environment variable LOCAL_WORLD_SIZE", expected="1 or more", got="0")
    return count
