"""How a process joins the others of its run: which backend carries what is on its device, and which all else."""

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


def join_world(place: ProcessInfo, store: Store, *, timeout: timedelta, backend: str | None = None) -> ProcessInfo:
    """Make the default group, of the backend of this rank's device, and return the place with what goes beside it.

    On GPUs the default group is NCCL's and so are all that are made from it: none opens connections of gloo's, but one
    group of all ranks, over which goes what lies on no device. Both are used once, in this order on all ranks.

    Args:
        place: of this process, whose device is set.
        store: in which all ranks meet.
        timeout: of both.
        backend: of the default group; None for the usual one, see `mimo.launch.start.rendezvous`.
    """
    device, backend = torch.device(place.device), backend or usual_backend(place.device)
    on_host = device.type == "cpu"
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=device if backend == dist.Backend.NCCL else None,  # others know nothing of it
    )
    if on_host:
        return place
    objects = dist.new_group(backend="gloo", timeout=timeout)
    connect([None], device=device)
    connect([objects], device=torch.device("cpu"))
    return attrs.evolve(place, objects=objects)


def join_alone(device: str = "cpu") -> None:
    """Make a default group of this process alone, unless there is a default group already.

    Args:
        device: on which this process computes, ``cpu`` or ``cuda:<index>``.
    """
    if not dist.is_initialized():
        dist.init_process_group(usual_backend(device), store=host_store("127.0.0.1", 0), rank=0, world_size=1)
