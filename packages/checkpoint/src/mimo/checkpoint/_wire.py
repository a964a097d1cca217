"""What ranks say to each other: JSON in tensors of bytes, whose sizes are looked at before room is made for them.

Nothing is pickled. (`mimo.topology.collectives` does the like for whoever may import it; checkpoints know no grids.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.checkpoint._tensors import view_bytes
from mimo.hooks import CheckpointError, parse_json

T = TypeVar("T")

MAX_BYTES = 4 << 30
"""Most that one rank takes in at once: four times the largest manifest, which holds what all of them say."""


@attrs.frozen
class Wire(Generic[T]):
    """How one kind of value travels.

    Args:
        pack: returns it as plain JSON data.
        unpack: returns what was packed; raises a `LookupError`, `TypeError` or `ValueError` where it can't be that.
    """

    pack: Callable[[T], Any]
    unpack: Callable[[Any], T]


PLAIN: Wire[Any] = Wire(lambda value: value, lambda value: value)
"""For what is plain JSON data already."""


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where bytes have to lie that a group carries: in host memory, unless it carries a device's alone."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a group of an accelerator's backend, and no accelerator"
    return torch.device(device.type, torch.accelerator.current_device_index())


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return every rank's ``value`` on the first rank, None on the others; collective."""
    text, sizes = _announce(value, group)
    padded = _pad(text, max(sizes))
    rows = [torch.empty_like(padded) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(padded, rows, group=group, group_dst=0)
    return None if rows is None else [_read(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's ``value`` on all ranks; collective."""
    text, sizes = _announce(value, group)
    padded = _pad(text, max(sizes))
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return [_read(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def scatter(values: Sequence[Any], group: dist.ProcessGroup | None) -> Any:
    """Return this rank's one of the ``values`` that the first rank gives, and nobody else; collective."""
    device, rank, size = device_of(group), dist.get_rank(group), dist.get_world_size(group)
    found = [_text_of(value, device) for value in values] if rank == 0 else []
    texts, errors = [text for text, _ in found], [error for _, error in found if error is not None]
    lengths = torch.tensor([len(text) for text in texts] or [0] * size, dtype=torch.int64, device=device)
    dist.broadcast(lengths, group=group, group_src=0)
    sizes = _check(lengths, errors[0] if errors else None)
    padded = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    rows = [_pad(text, max(sizes)) for text in texts] if rank == 0 else None
    dist.scatter(padded, rows, group=group, group_src=0)
    return _read(padded[: sizes[rank]])


def share(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the first rank's ``value`` on all ranks; collective."""
    device, is_first = device_of(group), dist.get_rank(group) == 0
    text, error = _text_of(value if is_first else None, device)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=0)
    (size,) = _check(length, error)
    if not is_first:
        text = text.new_empty(size)
    dist.broadcast(text, group=group, group_src=0)
    return _read(text)


def _announce(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return the text of a value, and how long all ranks' are."""
    device = device_of(group)
    text, error = _text_of(value, device)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)], dtype=torch.int64, device=device), group=group)
    return text, _check(torch.cat(lengths), error)


def _check(lengths: Tensor, error: Exception | None) -> list[int]:
    """Return lengths that all ranks know, or refuse them on all ranks; an error of this rank is then the cause."""
    sizes: list[int] = lengths.tolist()
    if min(sizes) < 1:
        raise CheckpointError(
            "checkpoint",
            expected="plain JSON data in what ranks exchange about it",
            got=f"something else in {sum(size < 1 for size in sizes)} of {len(sizes)}",
            fix="Values (Common, Owned) hold what JSON can, without numbers that are not finite.",
        ) from error
    if max(sizes) * len(sizes) > MAX_BYTES:
        raise CheckpointError(
            "checkpoint",
            expected=f"at most {MAX_BYTES} bytes for what {len(sizes)} ranks exchange about it",
            got=f"up to {max(sizes)} bytes for each",
            fix="Large data in values (Common, Owned) belongs into tensors.",
        )
    return sizes


def _text_of(value: Any, device: torch.device) -> tuple[Tensor, Exception | None]:
    """Return the text, empty for what is no JSON, and why: others wait, so it is refused after all have met."""
    try:
        return _to_bytes(value, device), None
    except (TypeError, ValueError, RecursionError) as error:
        return torch.empty(0, dtype=torch.uint8, device=device), error


def _to_bytes(value: Any, device: torch.device) -> Tensor:
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _pad(text: Tensor, size: int) -> Tensor:
    padded = text.new_zeros(size)
    padded[: len(text)] = text
    return padded


def _read(text: Tensor) -> Any:
    """Return what a text says; None, which nothing that is packed is, where it is no JSON."""
    held = text.cpu()
    try:
        return parse_json(bytes(view_bytes(held)))
    except ValueError:
        return None
