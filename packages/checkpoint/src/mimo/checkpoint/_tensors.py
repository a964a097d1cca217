"""Which tensors a checkpoint can hold, and how their bytes are seen without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mimo.checkpoint._boxes import Box
from mimo.hooks import CheckpointError

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


@attrs.frozen
class LocalTensor:
    """What this rank holds of a tensor: a box of the whole, or None where its mesh leaves this rank out."""

    local: torch.Tensor
    box: Box | None


def examine(tensors: Mapping[str, torch.Tensor]) -> dict[str, LocalTensor]:
    """Return what this rank holds of each tensor.

    Raises:
        CheckpointError: a tensor has no plain bytes, or its shard is not one box of the whole; names it and says why.
    """
    result: dict[str, LocalTensor] = {}
    boxes: dict[Hashable, Box | None] = {}  # PyTorch takes its time, and layers are sharded the same way
    for name, tensor in tensors.items():
        local = local_part(tensor)
        _check_plain(name, tensor.dtype, local)
        if isinstance(tensor, DTensor):
            cut = (tensor.shape, id(tensor.device_mesh), tensor.placements)
            if cut not in boxes:
                boxes[cut] = _find_box(name, tensor)
            box = boxes[cut]
        else:
            box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        if box is not None and box.shape != tuple(local.shape):
            assert isinstance(tensor, DTensor), name
            raise CheckpointError(
                name,
                expected=f"a local shard of shape {list(box.shape)}, as its placements {tensor.placements} say",
                got=f"{list(local.shape)}",
            )
        result[name] = LocalTensor(local, box)
    return result


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    with torch.no_grad():  # else a DTensor would take the long way
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied: keep the tensor while the view is in use."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B") if count else memoryview(b"")


def _check_plain(name: str, dtype: torch.dtype, local: torch.Tensor) -> None:
    if dtype not in CODES:
        raise CheckpointError(name, expected=f"a dtype of {', '.join(DTYPES)}", got=str(dtype))
    if local.layout is not torch.strided or local.is_meta:
        raise CheckpointError(
            name,
            expected="a dense tensor with data",
            got="a meta tensor" if local.is_meta else f"a {local.layout} tensor",
        )


def _find_box(name: str, tensor: DTensor) -> Box | None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            name,
            expected="a DTensor that is sharded or replicated",
            got=f"placements {tensor.placements}: a sum that is not done",
            fix="Redistribute it first.",
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    for dim in {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}:
        held = _held_indices(tensor, dim)
        if held and held != list(range(held[0], held[0] + len(held))):
            # PyTorch's planners would take it for a box that begins at its first index, and save wrong data.
            raise CheckpointError(
                name,
                expected="a shard that is one contiguous box of the whole tensor",
                got=f"placements {tensor.placements}, which leave gaps along dim {dim}",
            )
    (chunk,) = _create_chunk_list(tensor)
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


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
