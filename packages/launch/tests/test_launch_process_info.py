"""Which process this is, how many threads it takes, and how the signal is called that ended another."""

from __future__ import annotations

import mmap
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo.hooks import ConfigError
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


def test_cores_are_shared_by_the_ranks_of_a_machine_unless_the_user_says_otherwise() -> None:
    """Each rank gets at least one thread."""
    cores = len(os.sched_getaffinity(0))
    process = ProcessInfo(rank=0, world=2 * cores, local_rank=0)
    assert threads_for(process, {}) == 1
    assert threads_for(ProcessInfo(rank=0, world=1, local_rank=0), {}) == cores
    assert threads_for(process, {"OMP_NUM_THREADS": "3"}) is None


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


_PAGES = (1 << 26) // mmap.PAGESIZE


def _pages_mapped(_rank: int, environ: dict[str, str]) -> int:
    """Return how many pages are mapped for the second of two tensors of 64 MiB, the first of which is freed."""
    os.environ.update(environ)
    prepare(ProcessInfo(rank=0, world=1, local_rank=0))
    torch.ones(1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_that_is_freed_on_the_host_is_used_again(run_ranks: Callable[..., list[Any]]) -> None:
    """It is not mapped anew, unless the user has said how the C library is to allocate."""
    (kept,) = run_ranks(1, _pages_mapped, {})
    assert kept < _PAGES // 10
    for name, value in (("MALLOC_ARENA_MAX", "8"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=8")):
        (mapped,) = run_ranks(1, _pages_mapped, {name: value})
        assert mapped >= _PAGES


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
    assert seen == [given or value, max(1, len(os.sched_getaffinity(0)) // 2)], (
        "and what it does on the host has its share"
    )


def test_settings_of_the_allocator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever of its names."""
    monkeypatch.setattr(os, "environ", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _threads: None)
    prepare(ProcessInfo(rank=0, world=2, local_rank=0, device="cuda:0"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
