"""Which groups a run makes: of NCCL alone on GPUs, with one of gloo beside them, each used once, in one order.

But for those of two ranks on an edge, which connect at their first message.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from mimo.launch import ProcessInfo
from mimo.launch.runtime import join_world
from mimo.launch.start import world as _world
from mimo.schedule.runtime import channel, open_channels
from mimo.topology import Grid, Module, ModuleGraph, collectives, meshes

DAY = timedelta(days=1)
REAL = torch.zeros, dist.new_group, dist.all_reduce, distributed_c10d._new_process_group_helper


class Recorder:
    """Takes down how groups are made and used, as on a GPU; gloo's and the host stand in for NCCL's and devices."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Any, str] = {None: "default"}
        self._backends = {"default": "nccl"}

    def replace(self) -> None:
        """Put this in the place of what would need a GPU; the process ends after its one run."""
        for name in ("init_process_group", "new_group", "all_reduce", "batch_isend_irecv"):
            setattr(dist, name, getattr(self, name))
        setattr(torch, "zeros", self.zeros)  # noqa: B010 -- mypy takes it for a method
        for module in (meshes, channel):
            vars(module)["backend_for"] = {"cuda": "nccl", "cpu": "gloo"}.__getitem__
        vars(distributed_c10d)["_new_process_group_helper"] = self.make_group

    def init_process_group(self, backend: str, **keys: Any) -> None:
        """Take down the default group, which is there already."""
        self.lines.append(f"init {backend} of rank {keys['rank']}, timeout {keys['timeout'].days}")
        assert "device_id" not in keys, "all ranks would have to split each group of NCCL's from one on a device"

    def new_group(self, backend: str, **keys: Any) -> Any:
        """Make a group of all ranks."""
        group = REAL[1](backend=backend, **keys)
        self._add(group, backend, "all", keys["timeout"])
        return group

    def make_group(self, size: int, place: int, ranks: Any, backend: str, *args: Any, **keys: Any) -> Any:
        """Make a group of gloo's in the place of one of NCCL's."""
        made = REAL[3](size, place, ranks, dist.Backend("gloo"), *args, **keys)
        if backend != "gloo":
            self._add(made[0], backend, keys["group_desc"], keys["timeout"])
        return made

    def _add(self, group: Any, backend: str, text: str, timeout: timedelta) -> None:
        assert timeout == DAY
        name = f"{backend} for {text}"
        assert name not in self._backends, "a group is made once"
        self._names[group], self._backends[name] = name, backend
        self.lines.append(f"make {name}")

    def zeros(self, *shape: Any, device: Any, **keys: Any) -> Any:
        """Make a tensor of the host that remembers where it should lie."""
        found: Any = REAL[0](*shape, **keys)
        found.lies = torch.device(device).type
        return found

    def all_reduce(self, tensor: Any, group: Any = None, **keys: Any) -> Any:
        """Take down a sum, whose tensor must lie where the group carries it."""
        self._use(tensor, group)
        return REAL[2](tensor, group=group, **keys)

    def batch_isend_irecv(self, messages: Any) -> Any:
        """Nobody sends before the first step."""
        raise AssertionError(messages)

    def _use(self, tensor: Any, group: Any) -> None:
        name = self._names[group]
        assert tensor.lies == {"nccl": "cuda", "gloo": "cpu"}[self._backends[name]], name
        if f"use {name}" not in self.lines:
            self.lines.append(f"use {name}")


def _graph() -> ModuleGraph:
    """Vision over tensor ranks, language over lanes and stages, which share two ranks in different stages."""
    vision = Grid(name="vision", ranks=(1, 2), tp=2)
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
    """One group of gloo's beside them, and no group but those of pairs whose first use would be in a step."""
    for rank, lines in enumerate(run_ranks(4, _record)):
        made = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
        used = [line.removeprefix("use ") for line in lines if line.startswith("use ")]
        assert lines[0] == f"init nccl of rank {rank}, timeout 1"
        assert [name for name in made if not name.startswith("nccl ")] == [made[0]] == ["gloo for all"]
        pairs = [f"nccl for language.0-1 {way}, ranks {rank % 2}," for way in ("forward", "backward")]
        assert [name for name in made if name not in used] == [f"{pair}{rank % 2 + 2}" for pair in pairs]
        assert used == ["default", *(name for name in made if "language.0-1" not in name)]
        assert ("nccl for vision->language backward, ranks 0-2" in made) == (rank in {0, 1, 2})
        assert len(made) > 5


def test_world_guard_of_late_groups_can_fail(monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., Any]) -> None:
    """Groups that nobody uses before the first step show in what is taken down."""
    monkeypatch.setattr(meshes, "connects_late", lambda _backend: False)
    monkeypatch.setattr(_world, "connect", lambda _groups, device: device)
    assert collectives.connects_late("nccl")
    boundary = [f"use nccl for vision->language {way}, ranks 0-2" for way in ("forward", "backward")]
    for rank, lines in enumerate(run_ranks(4, _record)):
        assert [line for line in lines if line.startswith("use ")] == (boundary if rank in {0, 1, 2} else [])
