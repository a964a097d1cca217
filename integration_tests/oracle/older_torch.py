"""What torch 2.13 has and 2.11 has not, taken away: the names that differ, from whoever is not torch itself.

Everything here changes the process that it is called in, which is a rank's and ends after its one run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from oracle import Outcome, run_layout
from tables import Table
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from mimo_optimizer_distributed import _fsdp

NAMES = tuple(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name))
"""None of them where torch 2.11 itself runs."""


class _State:
    """What FSDP2 keeps of a module, with its one group under the name that it had in 2.11."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._fsdp_param_group = state._fsdp_param_groups[0]

    def __getattr__(self, name: str) -> Any:
        if name == "_fsdp_param_groups":
            raise AttributeError(name)
        return getattr(self._state, name)


def run_without_names(rank: int, settings: Table) -> Outcome:
    """Train on this rank with the torch that lacks them."""
    if not NAMES:  # it does lack them
        return run_layout(rank, settings)
    # Its own code calls what it has.
    vars(_fsdp_collectives)["dist"] = SimpleNamespace(**vars(dist))
    for name in NAMES:
        delattr(dist, name)
    group_of = _fsdp._group_of
    vars(_fsdp)["_group_of"] = lambda state: group_of(_State(state))  # type: ignore[arg-type]  # stands in for it
    return run_layout(rank, settings)
