"""Which process this is, how many threads it takes, and how the signal is called that ended another."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo.hooks import ConfigError, count_cores
from mimo.launch import ProcessInfo, process_from
from mimo.launch.runtime import Fault, launch
from mimo.launch.start.worker import crowds, prepare, threads_for


def test_a_rank_that_is_no_number_is_refused() -> None:
    """The variable is named."""
    with pytest.raises(ConfigError, match="environment variable RANK: expected a whole number, got 'one'"):
        process_from({"RANK": "one", "WORLD_SIZE": "2"}, "cpu")


def test_a_port_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is opened."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(ConfigError, match="environment variable MASTER_PORT: expected a whole number, got 'a'"):
        launch(print, world=1)


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one may be that follows from the ids of a job."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        text = f"MASTER_PORT: expected a port that is free on the machine of rank 0, got {port}, which is in use"
        with pytest.raises(ConfigError, match=text):
            launch(print, world=2)


def test_a_signal_without_a_name_is_shown_by_its_number() -> None:
    """As those for real time are."""
    assert Fault.of_exit(2, -35).text == "rank 2 was ended by signal 35."


def test_cores_are_shared_by_the_ranks_of_a_machine_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank gets at least one thread."""
    cores = count_cores()
    process = ProcessInfo(rank=0, world=2 * cores, local_rank=0)
    assert threads_for(process, {}) == 1
    assert threads_for(ProcessInfo(rank=0, world=1, local_rank=0), {}) == cores
    assert threads_for(process, {"OMP_NUM_THREADS": "3"}) is None
    monkeypatch.setattr("mimo.launch.start.worker.count_cores", lambda: 6)  # as in a container
    assert [threads_for(ProcessInfo(rank=0, world=world, local_rank=0), {}) for world in (1, 4, 7)] == [6, 1, 1]


def _scheduled(_rank: int) -> list[int]:
    found = []
    for world in (1, 2):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        prepare(ProcessInfo(rank=0, world=world, local_rank=0))
        found.append(os.sched_getscheduler(0))
    return found


def test_ranks_of_one_machine_wait_in_turn(run_ranks: Callable[..., list[Any]]) -> None:
    """Whoever is woken doesn't take the core of whoever wakes it; a rank by itself is left as it is."""
    assert run_ranks(1, _scheduled) == [[os.SCHED_OTHER, os.SCHED_BATCH]]
    process = ProcessInfo(rank=0, world=4096, local_rank=0)
    assert not crowds(process, {"RANK": "0", "WORLD_SIZE": "4096", "LOCAL_WORLD_SIZE": "1"})


class _System:
    """A C library that allows blocks on the heap up to a size."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.asked: list[tuple[int, int]] = []

    def mallopt(self, what: int, value: int) -> int:
        """Note what is asked for, and return whether that is done."""
        self.asked.append((what, value))
        return int(value <= self._largest)


@pytest.mark.parametrize(
    ("largest", "asked"),
    [
        (1 << 30, [(-3, 1 << 30), (-1, -1)]),
        (1 << 25, [(-3, 1 << 30), (-3, 1 << 25), (-1, -1)]),
        (0, [(-3, 1 << 30), (-3, 1 << 25)]),
    ],
)
def test_memory_of_the_host_is_kept_as_far_as_the_c_library_allows(
    largest: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where large blocks are mapped by themselves in any case: then all would be mapped, smaller ones too."""
    system = _System(largest)
    monkeypatch.setattr("ctypes.CDLL", lambda _name: system)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1"})
    prepare(ProcessInfo(rank=0, world=1, local_rank=0))
    assert system.asked == asked


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "8"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=8")])
def test_how_the_user_allocates_is_kept(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is by any variable of the C library."""
    system = _System(1 << 30)
    monkeypatch.setattr("ctypes.CDLL", lambda _name: system)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1", name: value})
    prepare(ProcessInfo(rank=0, world=1, local_rank=0))
    assert not system.asked


_PAGES = (1 << 26) // mmap.PAGESIZE


def _pages_mapped(_rank: int) -> int:
    """Return how many pages are mapped for the second of two tensors of about 64 MiB, the first of which is freed."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        del os.environ[name]
    prepare(ProcessInfo(rank=0, world=1, local_rank=0))
    torch.ones(1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones((1 << 24) - 1024)  # glibc before 2.38 finds no room for as much again
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="older releases map large blocks in any case")
def test_memory_that_is_freed_on_the_host_is_used_again(run_ranks: Callable[..., list[Any]]) -> None:
    """It is not mapped anew."""
    assert run_ranks(1, _pages_mapped)[0] < _PAGES // 10


@pytest.mark.parametrize("given", ["", "0"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_what_a_gpu_is_asked_for_unless_the_user_says_otherwise(
    name: str, value: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set before a GPU is chosen, and so before NCCL and the allocator read it."""
    monkeypatch.setattr(os, "environ", {name: given} if given else {})
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: seen.append(os.environ[name]))
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    prepare(ProcessInfo(rank=0, world=2, local_rank=0, device="cuda:0"))
    assert seen == [given or value, max(1, count_cores() // 2)], "and what it does on the host has its share"


def test_settings_of_the_allocator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever of its names."""
    monkeypatch.setattr(os, "environ", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _threads: None)
    prepare(ProcessInfo(rank=0, world=2, local_rank=0, device="cuda:0"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
