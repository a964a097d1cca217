"""Which groups a run makes: of NCCL alone on GPUs, with one of gloo beside them, each used once, in one order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mimo.launch import ProcessInfo
from mimo.launch.runtime import join_world
from mimo.launch.start import world as _world
from mimo.schedule.runtime import channel, open_channels
from mimo.topology import Grid, Module, ModuleGraph, collectives, meshes

DAY = timedelta(days=1)
REAL = torch.zeros, dist.new_group, dist.all_reduce, dist.isend, dist.irecv


class Recorder:
    """Takes down how groups are made and used, as on a GPU; gloo's and the host stand in for NCCL's and devices."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Any, str] = {None: "default"}
        self._backends = {"default": "nccl"}

    def replace(self) -> None:
        """Put this in the place of what would need a GPU; the process ends after its one run."""
        for name in ("init_process_group", "new_group", "all_reduce", "isend", "irecv"):
            setattr(dist, name, getattr(self, name))
        setattr(torch, "zeros", self.zeros)  # noqa: B010 -- mypy takes it for a method
        for module in (meshes, channel):
            vars(module)["backend_for"] = {"cuda": "nccl", "cpu": "gloo"}.__getitem__

    def init_process_group(self, backend: str, **keys: Any) -> None:
        """Take down the default group's backend and device, which is there already."""
        self.lines.append(f"init {backend} on {keys['device_id']}, timeout {keys['timeout'].days}")

    def new_group(self, ranks: Any = None, backend: str | None = None, **keys: Any) -> Any:
        """Make a group of gloo's in the place of one of ``backend``."""
        members = [*range(dist.get_world_size())] if ranks is None else ranks
        assert keys["timeout"] == DAY
        group = REAL[1](members, backend="gloo", **keys)
        if dist.get_rank() in members:
            name = f"{backend} {members} #{len(self._names)}"
            self._names[group] = name
            self._backends[name] = str(backend)
            self.lines.append(f"make {name}")
        return group

    def zeros(self, *shape: Any, device: Any, **keys: Any) -> Any:
        """Make a tensor of the host that remembers where it should lie."""
        found: Any = REAL[0](*shape, **keys)
        found.lies = torch.device(device).type
        return found

    def all_reduce(self, tensor: Any, group: Any = None, **keys: Any) -> Any:
        """Take down a sum, whose tensor must lie where the group carries it."""
        self._use(tensor, group)
        return REAL[2](tensor, group=group, **keys)

    def isend(self, tensor: Any, peer: int, group: Any = None, **keys: Any) -> Any:
        """Take down a message."""
        self._use(tensor, group)
        return REAL[3](tensor, peer, group=group, **keys)

    def irecv(self, tensor: Any, peer: int, group: Any = None, **keys: Any) -> Any:
        """Take down a message."""
        self._use(tensor, group)
        return REAL[4](tensor, peer, group=group, **keys)

    def _use(self, tensor: Any, group: Any) -> None:
        name = self._names[group]
        assert tensor.lies == {"nccl": "cuda", "gloo": "cpu"}[self._backends[name]], name
        if f"use {name}" not in self.lines:
            self.lines.append(f"use {name}")


def _graph() -> ModuleGraph:
    """Vision over tensor ranks, language over lanes and stages, on ranks of which two are shared."""
    vision = Grid(name="vision", ranks=range(2), tp=2)
    language = Grid(name="language", ranks=range(4), pp=2, dp=2)
    return ModuleGraph(
        modules=(
            Module(grid=vision, trains=(True,)),
            Module(grid=language, trains=(True, True), overlaps=frozenset({"sums"})),
        ),
        arrows=(("vision", "language"),),
    )


def _record(rank: int) -> list[str]:
    recorder = Recorder()
    recorder.replace()
    process = join_world(
        ProcessInfo(rank=rank, world=4, local_rank=rank, device=f"cuda:{rank}"), HashStore(), timeout=DAY
    )
    assert process.objects is not None
    meshes.Meshes(_graph(), rank=rank, device_type="cuda", timeout=DAY)
    open_channels(_graph(), device=torch.device("cuda"), timeout=DAY)
    return recorder.lines


def test_world_gpus_have_groups_of_nccl_alone_each_used_once_in_order(run_ranks: Callable[..., list[Any]]) -> None:
    """One group of gloo's beside them, a device that is given, and no group whose first use would be in a step."""
    for rank, lines in enumerate(run_ranks(4, _record)):
        made = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
        used = [line.removeprefix("use ") for line in lines if line.startswith("use ")]
        assert lines[0] == f"init nccl on cuda:{rank}, timeout 1"
        assert [name for name in made if not name.startswith("nccl ")] == [made[0]] == ["gloo [0, 1, 2, 3] #1"]
        assert used == ["default", *made]
        assert len(made) > 5


def test_world_guard_of_late_groups_can_fail(monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., Any]) -> None:
    """Groups that nobody uses before the first step show in what is taken down."""
    monkeypatch.setattr(meshes, "connects_late", lambda _backend: False)
    monkeypatch.setattr(_world, "connect", lambda _groups, device: device)
    assert collectives.connects_late("nccl")
    for lines in run_ranks(4, _record):
        used = [line for line in lines if line.startswith("use ")]
        assert used
        assert all("#" in line for line in used), "channels alone are left"
