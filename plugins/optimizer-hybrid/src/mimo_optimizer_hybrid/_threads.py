"""On how many threads the host steps: a rank's share of the cores that it may use; and the thread that has so many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import torch

from mimo.hooks import control_groups
from mimo_optimizer_hybrid._memory import key_of, machine_of


@attrs.frozen(kw_only=True)
class Cores:
    """Cores of a machine that processes share: those on which they may run, or as many as a quota gives time of.

    Args:
        key: the same in each process that shares them, 64 bits.
        count: how many they are.
    """

    key: int
    count: int


def own_cores(root: Path = Path("/")) -> list[Cores]:
    """Return all by which this process is bound: those on which it may run, and quotas of its control groups.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    machine, numbers = machine_of(root), sorted(os.sched_getaffinity(0))
    groups = [group for group in control_groups("cpu", root) if group.cores]
    return [
        Cores(key=key_of(machine, *map(str, numbers)), count=len(numbers)),
        *(Cores(key=key_of(machine, "cpu", group.number), count=group.cores) for group in groups),
    ]


def share_of_cores(own: Sequence[Cores], keys: Sequence[int], *, optimizers: int) -> int:
    """Return on how many threads each optimizer of a process may compute, as all may step at the same time.

    Args:
        own: by which this process is bound.
        keys: of what all processes that compute are bound by, this one among them.
        optimizers: how many this one has.
    """
    return max(1, min(cores.count // (keys.count(cores.key) * max(optimizers, 1)) for cores in own))


def host_thread(threads: int) -> ThreadPoolExecutor:
    """Return a thread on which torch computes with so many threads; on all others it does as before."""
    found = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mimo-hybrid")
    before = torch.get_num_threads()
    found.submit(_begin_thread, threads).result()
    torch.set_num_threads(before)  # what any thread has set last is what those begin with that are new to torch
    return found


def _begin_thread(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # it is new to torch until here
