"""Collectives for torch 2.11 to 2.13, and plain data between ranks as JSON.

One idea: what differs between releases or backends of `torch.distributed` is decided here and nowhere else. Nothing is
pickled: what ranks send each other as objects is JSON, whose size is looked at before room is made for it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "MAX_JSON_BYTES",
    "all_gather_json",
    "all_gather_single",
    "backend_for",
    "broadcast_json",
    "connect",
    "connects_late",
    "device_of",
    "reduce_scatter_single",
]

MAX_JSON_BYTES = 1 << 30
"""Most that one rank takes in at once of what others send as JSON."""

_AT_ONCE = frozenset({"gloo", "fake"})
"""Backends whose groups are connected when they are made."""


def all_gather_single(
    gathered: Tensor, x: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Put every rank's ``x`` one after the other into ``gathered``; collective.

    Backends differ in the shapes that they take, so they are given flat views of both.

    Args:
        gathered: contiguous, as many times the elements of ``x`` as the group has ranks, in any shape.
        x: contiguous, of as many elements on every rank.
        group: the ranks; None for the default group.
        async_op: return at once, with what is to be waited for.
    """
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: dist.Work | None = gather(gathered.view(-1), x.view(-1), group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    scattered: Tensor, x: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Put this rank's part of the sum of every rank's ``x`` into ``scattered``; collective.

    Args:
        scattered: contiguous, in any shape.
        x: contiguous, as many times the elements of ``scattered`` as the group has ranks: the parts of all ranks, one
            after the other.
        group: the ranks; None for the default group.
        async_op: return at once, with what is to be waited for.
    """
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(scattered.view(-1), x.view(-1), group=group, async_op=async_op)
    return work


def all_gather_json(
    value: Any, group: dist.ProcessGroup | None = None, *, max_bytes: int = MAX_JSON_BYTES
) -> list[Any]:
    """Return every rank's ``value``, by rank of the group; collective.

    Args:
        value: plain JSON data without numbers that are not finite.
        group: the ranks; None for the default group.
        max_bytes: most that a rank makes room for: the longest text, times the ranks.

    Raises:
        ValueError: on all ranks, if that would be more, or a rank sends no JSON; what is wrong with the value of
            this one is its cause.
    """
    text, error = _text_of(value, device_of(group))
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=text.device)
    all_gather_single(lengths, torch.tensor([len(text)], device=text.device), group)
    sizes: list[int] = lengths.tolist()
    longest = max(sizes)
    if min(sizes) < 1:
        raise _no_json(sizes.index(min(sizes))) from error
    if longest * len(sizes) > max_bytes:
        raise _refused(f"{longest} bytes of rank {sizes.index(longest)}", len(sizes), max_bytes)
    padded = text.new_zeros(longest)
    padded[: len(text)] = text
    gathered = text.new_empty(len(sizes), longest)
    all_gather_single(gathered, padded, group)
    return [_from_bytes(row[:size], rank) for rank, (row, size) in enumerate(zip(gathered.cpu(), sizes, strict=True))]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the ``value`` of the group's first rank, on all of its ranks; collective.

    Args:
        value: plain JSON data without numbers that are not finite; what other ranks give is not looked at.
        group: the ranks; None for the default group.
        max_bytes: most that a rank makes room for.

    Raises:
        ValueError: on all ranks, if it is longer, or no JSON; on the first with what is wrong as its cause.
    """
    is_first = dist.get_rank(group) == 0
    text, error = _text_of(value if is_first else None, device_of(group))
    length = torch.tensor([len(text)], dtype=torch.int64, device=text.device)
    dist.broadcast(length, group=group, group_src=0)
    size = int(length)
    if size < 1:
        raise _no_json(0) from error
    if size > max_bytes:
        raise _refused(f"{size} bytes of rank 0", 1, max_bytes)
    if not is_first:
        text = text.new_empty(size)
    dist.broadcast(text, group=group, group_src=0)
    return _from_bytes(text.cpu(), 0)


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where tensors have to lie that a group is to carry: in host memory if it can, else on this rank's device.

    Args:
        group: None for the default group.
    """
    if "cpu" in _backends(group):
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a group of an accelerator's backend, and no accelerator"
    return torch.device(device.type, torch.accelerator.current_device_index())


def backend_for(device_type: str) -> str:
    """Return the backend that carries tensors of a kind of device in the default group.

    Groups made with it carry nothing else: beside NCCL, none opens connections for host memory that it never uses.

    Args:
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ValueError: the default group carries no such tensors.
    """
    backends = _backends(None)
    if device_type not in backends:
        msg = f"expected a default process group for tensors of {device_type}, got one for {', '.join(backends)}"
        raise ValueError(msg)
    return backends[device_type]


def connects_late(backend: str) -> bool:
    """Return whether groups of a backend are connected at their first use, in which each rank waits for all others."""
    return backend not in _AT_ONCE


def connect(groups: Iterable[dist.ProcessGroup | None], *, device: torch.device) -> None:
    """Use groups once, one after the other, so that none is connected in the middle of a step; collective over each.

    Two ranks that first used two groups in different orders would wait for each other for ever.

    Args:
        groups: this rank's, in an order that all ranks share; None for the default group.
        device: where tensors have to lie that they carry.
    """
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group, by the kind of device whose tensors each carries."""
    pairs = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}


def _text_of(value: Any, device: torch.device) -> tuple[Tensor, Exception | None]:
    """Return the text, empty for what is no JSON, and why: others wait, so it is refused after all have met."""
    try:
        return _to_bytes(value, device), None
    except (TypeError, ValueError, RecursionError) as error:
        return torch.empty(0, dtype=torch.uint8, device=device), error


def _to_bytes(value: Any, device: torch.device) -> Tensor:
    """Return the text [n] of plain data."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _from_bytes(text: Tensor, rank: int) -> Any:
    try:
        return json.loads(ctypes.string_at(text.data_ptr(), len(text)))
    except (ValueError, RecursionError) as error:
        msg = f"rank {rank} has sent no JSON: {error}"
        raise ValueError(msg) from None


def _no_json(rank: int) -> ValueError:
    return ValueError(f"expected plain JSON data from every rank, got something else from rank {rank}")


def _refused(what: str, ranks: int, max_bytes: int) -> ValueError:
    times = f" for each of {ranks} ranks" if ranks > 1 else ""
    return ValueError(f"expected at most {max_bytes} bytes of JSON from all ranks, got {what}{times}")
