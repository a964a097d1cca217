"""Which tensors a checkpoint can hold, and how their bytes are seen without a copy."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mimo.hooks import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""The codes of the safetensors format, and the dtypes that they mean."""

CODES = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no plain bytes, or a shard that is not one box of the whole.

    Raises:
        CheckpointError: names the key and what is wrong with it.
    """
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.dtype not in CODES:
        raise CheckpointError(name, expected=f"a dtype of {', '.join(DTYPES)}", got=str(tensor.dtype))
    if plain.layout is not torch.strided or plain.is_meta:
        raise CheckpointError(
            name,
            expected="a dense tensor with data",
            got="a meta tensor" if plain.is_meta else f"a {plain.layout} tensor",
        )
    if isinstance(tensor, DTensor):
        _check_shard(name, tensor)


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied: keep the tensor while the view is in use."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B") if count else memoryview(b"")


def _check_shard(name: str, tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            name,
            expected="a DTensor that is sharded or replicated",
            got=f"placements {tensor.placements}: a sum that is not done",
            fix="Redistribute it first.",
        )
    if tensor.device_mesh.get_coordinate() is None:
        return
    (chunk,) = _create_chunk_list(tensor)
    local = tensor.to_local()
    if tuple(chunk.sizes) != tuple(local.shape):
        raise CheckpointError(
            name,
            expected=f"a local shard of shape {list(chunk.sizes)}, as its placements {tensor.placements} say",
            got=f"{list(local.shape)}",
        )
    for dim in {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}:
        held = _held_indices(tensor, dim)
        if held and held != list(range(held[0], held[0] + len(held))):
            # PyTorch's planners would take it for a box that begins at its first index, and save wrong data.
            raise CheckpointError(
                name,
                expected="a shard that is one contiguous box of the whole tensor",
                got=f"placements {tensor.placements}, which leave gaps along dim {dim}",
            )


def _held_indices(tensor: DTensor, dim: int) -> list[int]:
    """Return which indices along ``dim`` this rank holds, applying the placements from left to right."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    held = torch.arange(int(tensor.shape[dim]), device="cpu")
    for axis, placement in enumerate(tensor.placements):
        count = tensor.device_mesh.size(axis)
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            parts = held.chunk(int(placement.split_factor))
            held = torch.cat([_chunk(part, count, place[axis]) for part in parts])
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = _chunk(held, count, place[axis])
    return [int(index) for index in held.tolist()]


def _chunk(held: torch.Tensor, count: int, index: int) -> torch.Tensor:
    chunks: Sequence[torch.Tensor] = held.chunk(count)
    return chunks[index] if index < len(chunks) else held[:0]
