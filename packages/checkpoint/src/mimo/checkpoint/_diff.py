"""What two checkpoints have not in common: names, shapes, numbers and values, whatever pieces they lie in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from mimo.checkpoint import _json
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._source import Source

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MEASURED = 1 << 17  # numbers at a time, each of which takes some float64
_NOTHING = object()


@attrs.frozen(kw_only=True)
class TensorDifference:
    """A tensor whose numbers differ.

    Args:
        name: of the tensor.
        elements: how many it has.
        differing: how many of them differ in any bit: a NaN equals the same NaN, 0 is not -0.
        absolute: largest distance of two; infinite where one is no number.
        relative: largest distance over the larger of both; infinite where one is no number.
    """

    name: str
    elements: int
    differing: int
    absolute: float
    relative: float


@attrs.frozen(kw_only=True)
class ValueDifference:
    """A JSON value, or a part of one, that differs: its path, and both as JSON, "nothing" where there is none."""

    path: str
    first: str
    second: str


@attrs.frozen(kw_only=True)
class Differences:
    """All that differs between two checkpoints, each in the order of names.

    Args:
        only_first: names that the second lacks.
        only_second: names that the first lacks.
        kinds: names whose entries are of another kind, dtype, shape or owner.
        tensors: tensors with other numbers.
        values: JSON values, with step, config and topology.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    kinds: tuple[ValueDifference, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return any(attrs.astuple(self, recurse=False))


def diff(first: Path, second: Path) -> Differences:
    """Compare two checkpoints; for one process alone. Some MiB are held at a time, and what is read is verified.

    Args:
        first: a committed checkpoint.
        second: another one, saved in any layout.

    Raises:
        CheckpointError: one of them is damaged.
    """
    with Source(Path(first)) as one, Source(Path(second)) as other:
        both = sorted(one.manifest.names & other.manifest.names)
        kinds = [
            ValueDifference(path=name, first=kind, second=other_kind)
            for name in both
            if (kind := _kind(one.manifest, name)) != (other_kind := _kind(other.manifest, name))
        ]
        comparable = [name for name in both if name not in {kind.path for kind in kinds}]
        compared = [_compare_tensor(one, other, name) for name in comparable if name in one.manifest.tensors]
        about, other_about = _about(one.manifest), _about(other.manifest)
        values, other_values = _values(one.manifest), _values(other.manifest)
        pairs = [(name, values[name], other_values[name]) for name in comparable if name in values]
        pairs += [(name, about[name], other_about[name]) for name in about]
        return Differences(
            only_first=tuple(sorted(one.manifest.names - other.manifest.names)),
            only_second=tuple(sorted(other.manifest.names - one.manifest.names)),
            kinds=tuple(kinds),
            tensors=tuple(found for found in compared if found.differing),
            values=tuple(found for pair in pairs for found in _compare_values(*pair)),
        )


def _kind(manifest: Manifest, name: str) -> str:
    if name in manifest.tensors:
        return f"{manifest.tensors[name].dtype} {list(manifest.tensors[name].shape)}"
    return f"owned by {manifest.owned[name].module}" if name in manifest.owned else "common"


def _values(manifest: Manifest) -> dict[str, Any]:
    return {**manifest.common, **{name: entry.value for name, entry in manifest.owned.items()}}


def _about(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "config": manifest.config, "topology": manifest.topology}


def _compare_tensor(one: Source, other: Source, name: str) -> TensorDifference:
    shape = one.manifest.tensors[name].shape
    box = Box(tuple(0 for _ in shape), shape)
    differing, absolute, relative = 0, 0.0, 0.0
    for chunks in zip(one.chunks(name, box), other.chunks(name, box), strict=True):
        bits, other_bits = (chunk.view(_BITS[chunk.dtype.itemsize]) for chunk in chunks)
        if torch.equal(bits, other_bits):
            continue
        for part, other_part in zip(*(chunk.split(_MEASURED) for chunk in chunks), strict=True):
            count, distance, ratio = _measure(part, other_part)
            differing, absolute, relative = differing + count, max(absolute, distance), max(relative, ratio)
    return TensorDifference(name=name, elements=box.elements, differing=differing, absolute=absolute, relative=relative)


def _measure(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float, float]:
    """Return how many numbers differ, and the largest distance, absolute and relative."""
    bits = _BITS[one.dtype.itemsize]
    unequal = one.view(bits) != other.view(bits)
    if not unequal.any():
        return 0, 0.0, 0.0
    one, other = (each.view(bits)[unequal].view(each.dtype) for each in (one, other))
    distance = _distance(one, other)
    larger = torch.maximum(one.double().abs(), other.double().abs())
    ratio = torch.where(distance == 0, 0.0, distance / larger).nan_to_num(nan=math.inf, posinf=math.inf)
    return len(one), distance.max().item(), ratio.max().item()


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the differences of elements; also of large integers, whose difference float64 could round to 0."""
    far = (one.double() - other.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    if one.dtype not in (torch.int64, torch.uint64):
        return far
    one, other = one.view(torch.int64), other.view(torch.int64)
    near = (one < 0) == (other < 0)  # else it might be no int64
    return torch.where(near, (one - other).double().abs(), far)


def _compare_values(path: str, first: Any, second: Any) -> Iterator[ValueDifference]:
    parts, other_parts = _parts(first), _parts(second)
    if type(first) is type(second) and (parts or other_parts):
        for key in {**parts, **other_parts}:
            yield from _compare_values(path + key, parts.get(key, _NOTHING), other_parts.get(key, _NOTHING))
    elif (text := _show(first)) != (other_text := _show(second)):
        yield ValueDifference(path=path, first=text, second=other_text)


def _parts(value: Any) -> dict[str, Any]:
    """Return what a list or dict holds, by what is added to its path."""
    if isinstance(value, dict):
        return {f".{key}": part for key, part in value.items()}
    return {f"[{index}]": part for index, part in enumerate(value)} if isinstance(value, list) else {}


def _show(value: Any) -> str:
    return "nothing" if value is _NOTHING else _json.write(_json.encode(value, ""))
