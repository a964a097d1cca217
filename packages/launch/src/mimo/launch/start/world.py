"""How a process joins the others of its run: the default group for its device, and a gloo group for all else."""

from __future__ import annotations

from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mimo.launch.faults.store import host_store
from mimo.launch.process.process_info import ProcessInfo
from mimo.launch.start.rendezvous import usual_backend
from mimo.topology.collectives import connect


def join_world(process: ProcessInfo, store: Store, *, timeout: timedelta, backend: str | None = None) -> ProcessInfo:
    """Make the default group for this rank's device, and return the process with its group for objects.

    On GPUs the default group uses NCCL, and so do all others but one of all ranks that uses gloo, for objects and
    barriers. Both are used once here, in this order on all ranks. The default group is bound to no device: of one that
    is, NCCL splits every further group with all ranks of the world.

    Args:
        process: this one, whose device is set.
        store: that all ranks share.
        timeout: of both.
        backend: of the default group; None for the usual one, see `mimo.launch.start.rendezvous`.
    """
    device, backend = torch.device(process.device), backend or usual_backend(process.device)
    on_host = device.type == "cpu"
    dist.init_process_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=process.world,
        timeout=timeout,
    )
    if on_host:
        return process
    objects = dist.new_group(backend="gloo", timeout=timeout)
    connect([None], device=device)
    connect([objects], device=torch.device("cpu"))
    return attrs.evolve(process, objects=objects)


def join_alone(device: str = "cpu") -> None:
    """Make a default group of this process alone, unless there is a default group already.

    Args:
        device: on which this process computes, ``cpu`` or ``cuda:<index>``.
    """
    if not dist.is_initialized():
        dist.init_process_group(usual_backend(device), store=host_store("127.0.0.1", 0), rank=0, world_size=1)
