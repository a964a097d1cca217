"""Converts LoRA of our linears to LoRA of the linears and convolutions of a published model.

Where several of ours lie in one of theirs, each with rows of its own, what is added to that one has the sum of their
ranks: their ``down`` one below the other, and their ``up`` along a diagonal. Where one is a convolution there, as that
of patches is, ``down`` is one that sees the same, and ``up`` one that sees a single place.
Shapes: I inputs, O outputs, r the rank; R the sum of ranks, "there" the dims of a convolution beside its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from mimo.model import HfTensor

_WEIGHT = ".weight"


@attrs.frozen(kw_only=True, eq=False)
class Beside:
    """What stands beside a linear or convolution of the published model.

    Args:
        name: its path there.
        paths: those of our linears that are adapted in it.
        down: PEFT's ``lora_A``, [R, I], of a convolution [R, there].
        up: PEFT's ``lora_B``, [O, R], of a convolution [O, R, 1, …].
    """

    name: str
    paths: tuple[str, ...]
    down: Tensor
    up: Tensor


def beside_theirs(table: Iterable[HfTensor], ours: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[Beside]:
    """Yield what stands beside theirs; what can stand beside none of them is left out.

    Args:
        table: where the published model has what the module has.
        ours: ``down`` [r, I] and ``up`` [O, r] by path of our linears.
    """
    found: dict[str, list[HfTensor]] = {}
    for entry in table:
        if isinstance(entry.theirs, str) and entry.theirs.endswith(_WEIGHT) and entry.ours.endswith(_WEIGHT):
            found.setdefault(entry.theirs.removesuffix(_WEIGHT), []).append(entry)
    for name, entries in found.items():
        adapted = [entry for entry in entries if (path := _path(entry)) in ours and _fits(entry, *ours[path])]
        if adapted:
            yield _put_together(
                name, adapted, ours, outputs=max(entry.rows[1] if entry.rows else 0 for entry in entries)
            )


def _put_together(
    name: str, entries: Iterable[HfTensor], ours: Mapping[str, tuple[Tensor, Tensor]], *, outputs: int
) -> Beside:
    """Return all of one of theirs, which has so many ``outputs`` if it has rows of several of ours."""
    paths = tuple(map(_path, entries))
    downs, ups = zip(*map(ours.__getitem__, paths), strict=True)
    down = torch.cat([_seen_there(*each) for each in zip(entries, downs, strict=True)])
    up = down.new_zeros(outputs or len(ups[0]), len(down))
    column = 0
    for entry, one in zip(entries, ups, strict=True):
        row = entry.rows[0] if entry.rows else 0
        up[row : row + one.shape[0], column : column + one.shape[1]] = one
        column += one.shape[1]
    return Beside(name=name, paths=paths, down=down, up=up.view(*up.shape, *[1] * (down.dim() - 2)))


def _path(entry: HfTensor) -> str:
    return entry.ours.removesuffix(_WEIGHT)


def _fits(entry: HfTensor, down: Tensor, up: Tensor) -> bool:
    """Tell whether theirs has our outputs first, and for each of them our inputs, if in another order."""
    if down.dim() > 2:  # noqa: PLR2004 - each expert has its own
        return False
    part = entry.part_shape((up.shape[0], down.shape[1]))
    fits = part[0] == up.shape[0] and math.prod(part[1:]) == down.shape[1]
    return fits and (entry.dims is None or entry.dims[0] == 0)


def _seen_there(entry: HfTensor, down: Tensor) -> Tensor:
    """Return ``down`` as a weight of r outputs has its inputs there."""
    rank, inputs = down.shape
    _, *there = entry.part_shape((rank, inputs))
    if entry.dims is None:
        return down.reshape(rank, *there)
    turned = down.reshape(rank, *(there[dim - 1] for dim in entry.dims[1:]))
    return turned.permute([entry.dims.index(dim) for dim in range(len(entry.dims))])
