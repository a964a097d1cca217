"""On how many threads the host steps: a rank's share of the cores that it may use; and the thread that has so many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch

from mimo_optimizer_hybrid._memory import key_of, machine_of


@attrs.frozen(kw_only=True)
class Cores:
    """The cores of a machine on which a process may run.

    Args:
        key: the same in each process that may run on these and no others, 64 bits.
        count: how many they are.
    """

    key: int
    count: int


def own_cores() -> Cores:
    """Return those of this process."""
    numbers = sorted(os.sched_getaffinity(0))
    return Cores(key=key_of(machine_of(), *map(str, numbers)), count=len(numbers))


def share_of_cores(own: Cores, keys: Sequence[int], *, optimizers: int) -> int:
    """Return on how many threads each optimizer of a process may compute, as all may step at the same time.

    Args:
        own: cores of this process.
        keys: of the cores of all processes that compute, this one among them.
        optimizers: how many this one has.
    """
    return max(1, own.count // (keys.count(own.key) * max(optimizers, 1)))


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
