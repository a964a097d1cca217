"""What host memory can be had, and that no more is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from mimo.hooks import ConfigError
from mimo_optimizer_hybrid._memory import free_host_bytes
from mimo_optimizer_hybrid.optimizer import Held, HybridDeviceOptimizer

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\n"


def write(root: Path, path: str, text: str) -> None:
    """Write a file of a pretended system."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_free_memory_is_what_the_system_could_give(tmp_path: Path) -> None:
    """Without a control group that is less, with either version's limit or none."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert free_host_bytes(tmp_path) == 2_000_000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "5000\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 4000\ninactive_file 1000\n")
    assert free_host_bytes(tmp_path) == 2_000_000 * 1024


@pytest.mark.parametrize(
    ("folder", "limit", "used", "inactive"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_memory_is_what_the_control_group_leaves(
    folder: str, limit: str, used: str, inactive: str, tmp_path: Path
) -> None:
    """Its limit less what is used, of which cached files are given back."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, f"{folder}/{limit}", "100000\n")
    write(tmp_path, f"{folder}/{used}", "70000\n")
    write(tmp_path, f"{folder}/memory.stat", f"anon 40000\n{inactive} 5000\n")
    assert free_host_bytes(tmp_path) == 35000


def test_this_machine_has_some() -> None:
    """The number is that of a machine that runs tests."""
    assert 10**6 < free_host_bytes() < 10**15


def test_state_that_the_host_cannot_hold_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated."""

    def allocate(*_args: object, **_kwargs: object) -> None:
        pytest.fail("memory was allocated")

    monkeypatch.setattr("mimo_optimizer_hybrid._host_half.host_buffer", allocate)
    monkeypatch.setattr("mimo_optimizer_hybrid._staging.host_buffer", allocate)
    parameters = {"weight": nn.Parameter(torch.zeros(1024, 1024))}
    with pytest.raises(ConfigError) as error:
        HybridDeviceOptimizer(parameters, fraction=1, staging_bytes=0, free=lambda: 5 * 2**20)
    # Three numbers for each parameter, two staging buffers of a thirty-second, and the count of steps.
    assert str(error.value) == (
        "optimizer.fraction: expected a share of the optimizer's state that host memory can hold; it is "
        "12,845,060 bytes (0.01 GiB) on this rank, got 5,242,880 bytes (0.00 GiB) free. "
        "Set it lower, spread the state over more data lanes, or run fewer ranks on this machine."
    )


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1, "auto"])
def test_bytes_are_those_promised(fraction: float | Literal["auto"]) -> None:
    """Twelve a number that the host holds beside staging, eight a number of the device, four to count steps of each."""
    shapes = [(40, 50), (7,), (3, 1000), (0, 3), (11, 11, 11), (2500,), (), (900, 2)]
    parameters = {str(at): nn.Parameter(torch.zeros(shape)) for at, shape in enumerate(shapes)}
    optimizer = HybridDeviceOptimizer(parameters, fraction=fraction, bucket_bytes=4096, staging_bytes=0)
    numbers = sum(parameter.numel() for parameter in parameters.values())
    assert optimizer.held == optimizer.promised
    if fraction == 0:
        assert optimizer.promised == Held(host=0, device=8 * numbers + 4 * len(shapes))
    if fraction == 1:
        assert optimizer.promised.device == 0
        assert optimizer.promised.host == 12 * numbers + 4 * len(shapes) + 2 * 4 * 336
    if fraction != "auto":
        assert optimizer.fraction == pytest.approx(fraction, abs=0.2)


def test_memory_that_is_told_is_memory_that_is_taken() -> None:
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
