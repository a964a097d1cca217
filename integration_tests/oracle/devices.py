"""What only GPUs do, done on the host: the branches taken there, and what NCCL and autograd do otherwise than gloo.

Everything here changes the process that it is called in, which is a rank's and ends after its one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from oracle import Outcome, run_layout
from tables import Table
from torch.distributed import distributed_c10d

from mimo.model.attention import calls, kernels, padded, varlen
from mimo.model.layers import norms
from mimo.model.parallel import context, tensor
from mimo.model.testing.varlen import varlen_attention
from mimo.schedule.runtime import channel
from mimo.topology import meshes
from mimo.trainer import Trainer
from mimo_optimizer_distributed import _scatter

BRANCHES: Mapping[Any, Mapping[str, Any]] = {
    tensor: {"by_messages": lambda _x: False},
    context: {"by_messages": lambda _x: False},
    _scatter: {"_exchanges": lambda _gradient: False},
    norms: {"_is_faster": lambda _x, _weight: False},
    calls: {"_knows_corner_masks": lambda _device: True},
    kernels: {"takes_varlen": lambda _device, _dtype: True},
    padded: {"needs_alignment": lambda _query: True},
    varlen: {"varlen_attn": varlen_attention},
    meshes: {"connects_late": lambda _backend: True},
    channel: {"connects_late": lambda _backend: True},
}
"""What decides where a GPU goes another way, and what it says there."""
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
_MESSAGES = {"isend": "dst", "irecv": "src"}
_SECONDS = 60.0


def run_as_on_devices(rank: int, settings: Table) -> Outcome:
    """Train on this rank as on a GPU, but for who computes."""
    for module, answers in BRANCHES.items():
        assert answers.keys() <= vars(module).keys(), module
        vars(module).update(answers)
    meetings = meet_at_first_use()
    accumulate = Trainer.accumulate

    def begin(trainer: Trainer, step: int) -> Any:
        meetings.is_over = True
        return accumulate(trainer, step)

    setattr(Trainer, "accumulate", begin)  # noqa: B010 -- mypy forbids it
    _run_backward_in_threads()
    _refuse_pickles()
    return run_layout(rank, settings)


class _Meetings:
    """Has the first use of a group, and of each pair in it, wait until all of them have come to it, as NCCL does.

    A batch of messages waits for all its peers at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._store = distributed_c10d._get_default_store()
        self._met: set[str] = set()
        self.is_over = False

    def meet(self, group: Any, *peers: int) -> None:
        """Wait for the group's members, or for some of them, unless they have met."""
        group = group or distributed_c10d._get_default_group()
        members, rank = dist.get_process_group_ranks(group), dist.get_rank()
        sets = [sorted([rank, peer]) for peer in peers] or [members]
        coming = {f"first use of {group.group_name} by {ranks}": ranks for ranks in sets if len(ranks) > 1}
        coming = {key: ranks for key, ranks in coming.items() if key not in self._met}
        for key, ranks in coming.items():
            assert not self.is_over or peers, f"{key} in a step: no collective may have to wait for a connection there"
            is_connected = f"first use of {group.group_name} by {members}" in self._met
            assert ranks == members or is_connected, f"{key}: before all of {members} have used the group together"
            self._store.add(key, 1)
        self._met.update(coming)
        until = time.monotonic() + self._seconds
        for key, ranks in coming.items():
            while self._store.add(key, 0) < len(ranks):
                assert time.monotonic() < until, f"{key}: some never came"
                time.sleep(0.001)


def meet_at_first_use(*, seconds: float = _SECONDS) -> _Meetings:
    """Have each group connect at its first use; who waits longer than ``seconds`` raises an error."""
    meetings = _Meetings(seconds)
    for name in _COLLECTIVES:
        vars(dist)[name] = _meeting(getattr(dist, name), meetings)
    for name, end in _MESSAGES.items():
        vars(dist)[name] = _messaging(getattr(dist, name), end, meetings)
    vars(dist)["batch_isend_irecv"] = _batching(dist.batch_isend_irecv, meetings)
    vars(dist)["P2POp"] = _Message
    return meetings


class _Message(distributed_c10d.P2POp):
    """A message of a batch; its class looks for the functions that it knows, which wait for nobody here."""

    def __new__(cls, op: Any, *args: Any, **keys: Any) -> Any:
        return super().__new__(cls, getattr(op, "__wrapped__", op), *args, **keys)

    def __init__(self, op: Any, *args: Any, **keys: Any) -> None:
        super().__init__(getattr(op, "__wrapped__", op), *args, **keys)


def _batching(batch: Callable[..., Any], meetings: _Meetings) -> Callable[..., Any]:
    @wraps(batch)
    def call(messages: Any) -> Any:
        meetings.meet(messages[0].group, *(message.peer for message in messages))
        return batch(messages)

    return call


def _meeting(collective: Callable[..., Any], meetings: _Meetings) -> Callable[..., Any]:
    @wraps(collective)
    def call(*args: Any, group: Any = None, **keys: Any) -> Any:
        meetings.meet(group)
        return collective(*args, group=group, **keys)

    return call


def _messaging(message: Callable[..., Any], end: str, meetings: _Meetings) -> Callable[..., Any]:
    @wraps(message)
    def call(rows: Any, peer: int | None = None, group: Any = None, **keys: Any) -> Any:
        in_group = keys.get(f"group_{end}")
        met = peer if in_group is None else dist.get_global_rank(group, in_group)
        assert met is not None
        meetings.meet(group, met)
        return message(rows, peer, group=group, **keys)

    return call


def _run_backward_in_threads() -> None:
    """Have each backward run in a thread of its own, as autograd has one for each device."""
    backward = torch.autograd.backward

    def run(*args: Any, **keys: Any) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                backward(*args, **keys)
            except BaseException as error:  # noqa: BLE001 -- raised below, in the thread that asked
                errors.append(error)

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    vars(torch.autograd)["backward"] = run


def _refuse_pickles() -> None:
    for name in ("_object_to_tensor", "_tensor_to_object"):
        vars(distributed_c10d)[name] = partial(_refuse, name)


def _refuse(name: str, *_args: object, **_keys: object) -> Any:
    msg = f"{name}: an object was pickled for another rank"
    raise AssertionError(msg)
