"""Process groups that their members make alone, whatever other groups each of them is in.

`torch.distributed.new_group` names a group by how many groups a process has made or is in, so that either every rank of
the world makes every group, or members that are in different other groups call one group by different names and wait
for each other for ever. Here a name follows from what the group is for, and from its ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mimo.topology._ranks import show_ranks

__all__ = ["GroupMaker"]


class GroupMaker:
    """Makes the groups of this rank, of one backend. Have one on every rank of the world, in one order with all others.

    Args:
        backend: of all its groups.
        timeout: likewise; None: as the backend has it.

    Raises:
        ValueError: the default group is bound to a device, so that groups would be split from it by all its ranks.
    """

    def __init__(self, *, backend: str, timeout: timedelta | None = None) -> None:
        default = distributed_c10d._get_default_group()  # noqa: SLF001
        if default.bound_device_id is not None:
            msg = (
                "expected a default process group that is bound to no device, got one with device_id "
                f"{default.bound_device_id}, of which NCCL splits each group with all ranks of the world. Leave "
                "device_id out of init_process_group, and call torch.cuda.set_device instead."
            )
            raise ValueError(msg)
        self._backend = dist.Backend(backend)
        self._timeout = distributed_c10d._get_default_timeout(self._backend) if timeout is None else timeout  # noqa: SLF001
        self._rank = dist.get_rank()
        self._store = distributed_c10d._get_default_store()  # noqa: SLF001
        self._number = self._store.add(f"group makers of rank {self._rank}", 1)

    def make(self, ranks: Sequence[int], *, purpose: str) -> dist.ProcessGroup:
        """Make a group. All its members do, each in one order with all other groups that it is in; others do nothing.

        Args:
            ranks: its members, ascending, this rank among them.
            purpose: what it is for; no other group of this maker has the same purpose and ranks.
        """
        name = hashlib.blake2b(f"{self._number} {purpose} {list(ranks)}".encode(), digest_size=16).hexdigest()
        make: Any = distributed_c10d._new_process_group_helper  # noqa: SLF001
        place, text = ranks.index(self._rank), f"{purpose}, ranks {show_ranks(ranks)}"
        group: dist.ProcessGroup
        group, _ = make(
            len(ranks), place, list(ranks), self._backend, self._store, name, timeout=self._timeout, group_desc=text
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}  # noqa: SLF001
        return group
