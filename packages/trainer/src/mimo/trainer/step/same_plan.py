"""Whether all ranks have made the same plans: each makes its own, and some weigh what a rank reads or was told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from mimo.hooks import PlanError
from mimo.schedule import Plan
from mimo.topology.collectives import all_gather_single

_BYTES = 8


def check_plans(plans: Iterable[Plan], *, device: torch.device) -> None:
    """Refuse plans that differ between ranks, which would wait for each other. Call it on every rank of the world.

    Args:
        plans: those that this rank will run, in the same order everywhere.
        device: where the process group works.

    Raises:
        PlanError: two ranks are named that have different plans.
    """
    found = hashlib.blake2b(digest_size=_BYTES)
    for plan in plans:
        found.update(plan.to_json().encode())
    mine = torch.tensor([int.from_bytes(found.digest(), "big", signed=True)], device=device)
    everybody = mine.new_empty(dist.get_world_size())
    all_gather_single(everybody, mine)
    first, *others = everybody.tolist()
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise PlanError(
                "schedule",
                expected="the same plan on all ranks",
                got=f"one on rank 0, and another on rank {rank}",
                fix="Give their machines the same data, the same file under schedule.profile, and the same packages.",
            )
