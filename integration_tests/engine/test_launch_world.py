"""Which groups a process makes when it joins the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its own types don't say so

from mimo.launch import ProcessInfo
from mimo.launch.runtime import join_world

DAY = timedelta(days=1)


def _on_host(rank: int) -> tuple[str, bool]:
    made: list[str] = []
    vars(dist)["init_process_group"] = lambda backend, **keys: made.append(f"{backend} {'device_id' in keys}")
    process = join_world(ProcessInfo(rank=rank, world=1, local_rank=rank), HashStore(), timeout=DAY)
    return made[0], process.objects is None


def test_launch_hosts_need_one_group_of_gloo(run_ranks: Callable[..., list[Any]]) -> None:
    """Without a device the default group does all, and is bound to none."""
    assert run_ranks(1, _on_host) == [("gloo False", True)]
