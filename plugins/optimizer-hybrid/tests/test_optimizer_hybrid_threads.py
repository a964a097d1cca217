"""On how many threads of torch the host steps: those of its setting, or a rank's share of the cores it may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer.runtime import LocalAdamW, ModuleOptimizer, fused_adamw
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig, _agreement
from mimo_optimizer_hybrid._threads import Cores, own_cores, share_of_cores
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

SIZE = 30_001


@contextmanager
def threads_noted(room: str) -> Iterator[list[int]]:
    """Note on how many threads torch computes each time that a module of the plugin steps something."""
    noted: list[int] = []

    def note(*args: Any) -> None:
        noted.append(torch.get_num_threads())
        fused_adamw(*args)

    with patch(f"mimo_optimizer_hybrid.{room}.fused_adamw", note):
        yield noted


def of_a_new_thread() -> int:
    """Return on how many threads torch computes in a thread that has done nothing before."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def make(**settings: Any) -> tuple[nn.Parameter, HybridDeviceOptimizer]:
    """Return a parameter of which the host holds all, and its optimizer."""
    parameter = nn.Parameter(torch.linspace(-1, 1, SIZE))
    return parameter, HybridDeviceOptimizer([parameter], lr=0.1, fraction=1, **settings)


def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Take a step by a gradient that depends on the values."""
    parameter.grad = parameter.detach().sin()
    optimizer.step()


@pytest.mark.parametrize("threads", [2, 3])
def test_the_host_steps_on_threads_of_its_own(threads: int) -> None:
    """Only it: whoever makes the optimizer, and threads that begin later, compute on as many as before."""
    before = torch.get_num_threads(), of_a_new_thread()
    parameter, optimizer = make(threads=threads)
    assert (torch.get_num_threads(), of_a_new_thread()) == before
    with threads_noted("_host_half") as noted:
        step(parameter, optimizer)
        step(parameter, optimizer)
    assert set(noted) == {threads}
    assert (torch.get_num_threads(), of_a_new_thread()) == before


def test_the_number_of_threads_changes_no_bit() -> None:
    """Of values that one thread steps."""
    parameter, optimizer = make(threads=3)
    expected = nn.Parameter(parameter.detach().clone())
    plain = LocalAdamW([expected], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(3):
        step(parameter, optimizer)
        step(expected, plain)
    assert torch.equal(parameter, expected)


def test_what_says_nothing_steps_on_as_many_as_its_maker() -> None:
    """A loop that has set them for torch need not say so twice."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        parameter, optimizer = make()
    finally:
        torch.set_num_threads(before)
    with threads_noted("_host_half") as noted:
        step(parameter, optimizer)
    assert set(noted) == {2}


def test_trial_steps_of_a_fraction_are_on_as_many() -> None:
    """Those of the host's half; those of the device's are where it is made."""
    with threads_noted("_balance") as noted:
        make(threads=3)
        assert not noted
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(64))], fraction="auto", threads=3)
    assert set(noted) == {3, torch.get_num_threads()}


@pytest.mark.parametrize(
    ("cores", "keys", "optimizers", "threads"),
    [
        (16, [1, 1, 2, 1], 1, 5),
        (16, [1, 1, 2, 1], 2, 2),
        (16, [2, 1, 2], 1, 16),
        (2, [1] * 8, 1, 1),
        (1, [1], 3, 1),
        (4, [1, 1], 0, 2),
    ],
)
def test_ranks_share_the_cores_that_they_may_use(cores: int, keys: list[int], optimizers: int, threads: int) -> None:
    """Those of one machine with the same cores, and the optimizers of each; all have a thread at least."""
    assert share_of_cores([Cores(key=1, count=cores)], keys, optimizers=optimizers) == threads


@pytest.mark.parametrize(("quotas", "threads"), [((4, 6), 2), ((16, 6), 3), ((16, 64), 4)])
def test_ranks_share_what_binds_them_most(quotas: tuple[int, int], threads: int) -> None:
    """Four ranks on 16 cores; two of them in one control group, and all in another."""
    own = [Cores(key=1, count=16), Cores(key=2, count=quotas[0]), Cores(key=3, count=quotas[1])]
    assert share_of_cores(own, [1, 2, 3, 1, 2, 3, 1, 1], optimizers=1) == threads


def write(root: Path, path: str, text: str) -> None:
    """Write a file of a pretended system."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("group", "outer", "inner", "counts"),
    [
        ("/a/b", -1, 150_000, [2]),
        ("/a/b", 400_000, 50_000, [4, 1]),
        ("/", 300_000, -1, [3]),
        ("/of/the/host", 300_000, 100_000, [3]),
        ("/a/b", -1, -1, []),
    ],
)
def test_quotas_of_control_groups_count(
    version: int, group: str, outer: int, inner: int, counts: list[int], tmp_path: Path
) -> None:
    """In cores, rounded up; a container sees its own group as the root."""
    write(tmp_path, "proc/self/cgroup", f"4:cpu,cpuacct:{group}\n" if version == 1 else f"0::{group}\n")
    for folder, quota in (("", outer), ("a/", -1), ("a/b/", inner)):
        if version == 1:
            write(tmp_path, f"sys/fs/cgroup/cpu/{folder}cpu.cfs_quota_us", f"{quota}\n")
            write(tmp_path, f"sys/fs/cgroup/cpu/{folder}cpu.cfs_period_us", "100000\n")
        else:
            write(tmp_path, f"sys/fs/cgroup/{folder}cpu.max", f"{quota if quota > 0 else 'max'} 100000\n")
    first, *quotas = own_cores(tmp_path)
    assert first.count == len(os.sched_getaffinity(0))
    assert [cores.count for cores in quotas] == counts
    assert len({cores.key for cores in (first, *quotas)}) == 1 + len(counts)


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other cores have another key, and so have those of another machine."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {3, 1})
    one, *_ = own_cores()
    assert (one.count, one) == (2, own_cores()[0])
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {3, 2})
    other, *_ = own_cores()
    monkeypatch.setattr("mimo_optimizer_hybrid._threads.machine_of", lambda _root: "elsewhere")
    assert len({one.key, other.key, own_cores()[0].key}) == 3


def threads_of_a_rank(rank: int, threads: int, keys: list[int]) -> int:
    """Return on how many threads the host of a rank steps that was built with a setting, where it has seven cores."""
    grid = Grid(name="model", ranks=tuple(range(len(keys))), dp=len(keys))
    meshes = Meshes(ModuleGraph(modules=(Module(grid=grid, trains=(True,)),), arrows=()), rank=rank, device_type="cpu")
    layer = nn.Linear(4, 4)
    parameters = {f"model.{name}": value for name, value in layer.named_parameters()}
    part = ModuleParameters(grid=grid, rank=rank, parameters=parameters, modules=(layer,))
    config = CpuOffloadConfig(fraction=1, threads=threads)
    with patch.object(_agreement, "own_cores", lambda: [Cores(key=keys[rank], count=7)]):
        module = ModuleOptimizer.build(
            {0: part}, spec=HYBRID, config=config, learning_rate=LearningRate(lr=0.1), meshes=meshes
        )
    for value in layer.parameters():
        value.grad = torch.ones_like(value)
    with threads_noted("_host_half") as noted:
        for stepper in module.steppers:
            stepper.optimizer.step()
            assert isinstance(stepper.optimizer, HybridDeviceOptimizer)
            stepper.optimizer.synchronize()
    (found,) = set(noted)
    return found


@pytest.mark.parametrize(
    ("threads", "keys", "expected"), [(0, [1, 1], [3, 3]), (0, [1, 2], [7, 7]), (2, [1, 1], [2, 2])]
)
def test_ranks_of_a_run_step_on_their_share_or_as_settings_say(
    threads: int, keys: list[int], expected: list[int], run_ranks: Callable[..., list[Any]]
) -> None:
    """Whatever ``OMP_NUM_THREADS`` is, which torchrun sets to 1 by itself, as it is 1 here."""
    assert run_ranks(2, threads_of_a_rank, threads, keys) == expected
