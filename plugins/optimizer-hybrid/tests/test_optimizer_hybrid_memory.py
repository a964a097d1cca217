"""What host memory can be had, and that no more is taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from mimo.hooks import ConfigError
from mimo_optimizer_hybrid._agreement import ask_together
from mimo_optimizer_hybrid._memory import Pool, ask_alone, pools
from mimo_optimizer_hybrid.optimizer import HeldBytes, HybridDeviceOptimizer

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\n"
SYSTEM = 2_000_000 * 1024


def write(root: Path, path: str, text: str) -> None:
    """Write a file of a pretended system."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def free(root: Path) -> list[int]:
    """Return what is free of each pool, the least first; that of the system is one of them."""
    write(root, "proc/meminfo", MEMINFO)
    found = pools(root)
    assert found[0].free == SYSTEM
    assert len({pool.key for pool in found}) == len(found)
    return sorted(pool.free for pool in found)


def write_version_2(root: Path, group: str, limit: str, used: int) -> None:
    """Write what a control group may use and uses; 1,000 bytes of it are cached."""
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", "anon 4000\ninactive_file 1000\n")


def write_version_1(root: Path, group: str, limit: str, used: int) -> None:
    """Write the same as an older Linux does."""
    folder = f"sys/fs/cgroup/memory/{group}"
    write(root, f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{used}\n")
    write(root, f"{folder}/memory.stat", "anon 4000\ninactive_file 10\ntotal_inactive_file 1000\n")


VERSIONS = [("0::", write_version_2), ("3:cpu,cpuacct:/elsewhere\n4:memory:", write_version_1)]


def test_without_limits_memory_is_what_the_system_could_give(tmp_path: Path) -> None:
    """Where there are no control groups, or one that has no limit."""
    assert free(tmp_path) == [SYSTEM]
    write_version_2(tmp_path, "", "max", 5000)
    assert free(tmp_path) == [SYSTEM]


@pytest.mark.parametrize(("prefix", "group"), VERSIONS)
def test_a_control_group_and_all_around_it_count(
    prefix: str, group: Callable[[Path, str, str, int], None], tmp_path: Path
) -> None:
    """What each may use less what it does, of which cached files are given back; never less than nothing."""
    write(tmp_path, "proc/self/cgroup", f"{prefix}/a/b/c\n")
    group(tmp_path, "a", "100000", 70000)
    group(tmp_path, "a/b", "50000", 20000)
    group(tmp_path, "a/b/c", "1000", 5000)
    group(tmp_path, "a/other", "10", 10)
    assert free(tmp_path) == [0, 31000, 31000, SYSTEM]


@pytest.mark.parametrize(("prefix", "group"), VERSIONS)
@pytest.mark.parametrize("path", ["/docker/of/the/host", "/../../beside", "/"])
def test_a_container_sees_its_own_group_as_the_root(
    path: str, prefix: str, group: Callable[[Path, str, str, int], None], tmp_path: Path
) -> None:
    """Whatever the path of its group is from outside."""
    write(tmp_path, "proc/self/cgroup", f"{prefix}{path}\n")
    group(tmp_path, "", "100000", 70000)
    assert free(tmp_path) == [31000, SYSTEM]


def test_this_machine_has_some() -> None:
    """The numbers are those of a machine that runs tests, and no other process finds other keys."""
    assert all(10**6 < pool.free < 10**19 for pool in pools())
    keys = "from mimo_optimizer_hybrid._memory import pools; print([pool.key for pool in pools()])"
    command = [sys.executable, "-c", keys]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout  # noqa: S603
    assert printed.strip() == str([pool.key for pool in pools()])


def refuse(_bytes: int) -> None:
    """Ask for memory where there are 5 MiB."""
    ask_together(_bytes, [Pool(key=1, free=5 * 2**20), Pool(key=2, free=6 * 2**20)], torch.device("cpu"))


def test_state_that_the_host_cannot_hold_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated."""

    def allocate(*_args: object, **_kwargs: object) -> None:
        pytest.fail("memory was allocated")

    monkeypatch.setattr("mimo_optimizer_hybrid._host_half.host_buffer", allocate)
    monkeypatch.setattr("mimo_optimizer_hybrid._staging.host_buffer", allocate)
    parameters = {"weight": nn.Parameter(torch.zeros(1024, 1024))}
    with pytest.raises(ConfigError) as error:
        HybridDeviceOptimizer(parameters, fraction=1, staging_bytes=0, ask=refuse)
    # Three numbers for each parameter, two staging buffers of a thirty-second, and the count of steps.
    assert str(error.value) == (
        "optimizer.fraction: expected a share of the optimizer's state that host memory can hold; it is "
        "12,845,060 bytes (12.3 MiB), got 5,242,880 bytes (5.0 MiB) free. "
        "Set fraction lower in the table that chooses this plugin (optimizer, a module's or a pattern's), spread the "
        "state over more data lanes, or run fewer ranks on this machine."
    )


def test_a_process_that_is_alone_asks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what an optimizer does that nobody else has asked for."""
    monkeypatch.setattr("mimo_optimizer_hybrid._memory.pools", lambda: [Pool(key=1, free=700)])
    ask_alone(700)
    with pytest.raises(ConfigError, match=r"; it is 701 bytes, got 700 bytes free\."):
        ask_alone(701)
    with pytest.raises(ConfigError, match=r"; it is 1,504 bytes \(1\.5 KiB\), got 700 bytes free\."):
        HybridDeviceOptimizer({"weight": nn.Parameter(torch.zeros(93))}, fraction=1)


MACHINE, OTHER, CONTAINER = 1, 2, 3


def ask(rank: int, needed: list[int], found: list[list[tuple[int, int]]]) -> str:
    """Return the error of a rank that asks for memory."""
    own = [Pool(key=key, free=free) for key, free in found[rank]]
    try:
        ask_together(needed[rank], own, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("needed", "found", "printed"),
    [
        ([40, 50, 0], [[(MACHINE, 95)], [(MACHINE, 90)], [(MACHINE, 95)]], ""),
        (
            [40, 51, 0],
            [[(MACHINE, 95)], [(MACHINE, 90)], [(MACHINE, 95)]],
            "91 bytes for ranks 0, 1 together, got 90 bytes free",
        ),
        ([90, 90, 60], [[(MACHINE, 90)], [(OTHER, 90)], [(CONTAINER, 90)]], ""),
        (
            [90, 60, 31],
            [[(MACHINE, 90)], [(OTHER, 90)], [(OTHER, 95)]],
            "91 bytes for ranks 1, 2 together, got 90 bytes free",
        ),
        (
            [40, 40, 5],
            [[(MACHINE, 99), (CONTAINER, 41)], [(MACHINE, 99)], [(MACHINE, 99), (CONTAINER, 44)]],
            "45 bytes for ranks 0, 2 together, got 41 bytes free",
        ),
        (
            [0, 0, 2**30],
            [[(MACHINE, 99)], [(MACHINE, 99)], [(MACHINE, 99)]],
            "1,073,741,824 bytes (1.0 GiB) for rank 2, got 99 bytes free",
        ),
        ([0, 0, 0], [[(MACHINE, 0)], [(MACHINE, 0)], [(MACHINE, 0), (OTHER, 0), (CONTAINER, 0)]], ""),
    ],
    ids=["enough", "too much together", "apart", "one machine", "one container", "one rank", "nothing"],
)
def test_ranks_that_share_memory_ask_together(
    needed: list[int], found: list[list[tuple[int, int]]], printed: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """All ranks of the run get the same error, also those that hold nothing or are on another machine."""
    begin = "optimizer.fraction: expected a share of the optimizer's state that host memory can hold; it is "
    end = (
        ". Set fraction lower in the table that chooses this plugin (optimizer, a module's or a pattern's), spread the "
        "state over more data lanes, or run fewer ranks on this machine."
    )
    assert run_ranks(3, ask, needed, found) == [f"{begin}{printed}{end}" if printed else ""] * 3


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1, "auto"])
def test_bytes_are_those_promised(fraction: float | Literal["auto"]) -> None:
    """Twelve a number that the host holds beside staging, eight a number of the device, four to count steps of each."""
    shapes = [(40, 50), (7,), (3, 1000), (0, 3), (11, 11, 11), (2500,), (), (900, 2)]
    parameters = {str(at): nn.Parameter(torch.zeros(shape)) for at, shape in enumerate(shapes)}
    optimizer = HybridDeviceOptimizer(parameters, fraction=fraction, bucket_bytes=4096, staging_bytes=0)
    numbers = sum(parameter.numel() for parameter in parameters.values())
    assert optimizer.held == optimizer.promised
    if fraction == 0:
        assert optimizer.promised == HeldBytes(host=0, device=8 * numbers + 4 * len(shapes))
    if fraction == 1:
        assert optimizer.promised.device == 0
        assert optimizer.promised.host == 12 * numbers + 4 * len(shapes) + 2 * 4 * 336
    if fraction != "auto":
        assert optimizer.fraction == pytest.approx(fraction, abs=0.2)


def test_memory_that_is_reported_is_memory_that_is_taken() -> None:
    """The process grows by what was promised, when the optimizer is made and not in its first step."""
    parameters = {"weight": nn.Parameter(torch.zeros(16, 2**20))}
    parameters["weight"].grad = torch.ones(16, 2**20)

    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    before = resident()
    optimizer = HybridDeviceOptimizer(parameters, fraction=1, staging_bytes=0)
    made = resident()
    optimizer.step()
    # Beside it there is what the allocator and the thread take.
    assert 0.9 * optimizer.promised.host < made - before < 1.3 * optimizer.promised.host
    assert resident() - made < 0.3 * optimizer.promised.host
