"""A module on one layout beside the same on another: what is the same for every kind of plugin."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from mimo.model.testing.built import BuiltParts, Layout
from mimo.model.testing.checks import BrokenError
from mimo.model.testing.ranks import run_ranks
from mimo.topology.collectives import all_gather_json

LayoutT = TypeVar("LayoutT", bound=Layout)


def assert_on_ranks(
    what: str, steps: Iterable[Sequence[LayoutT]], check: Callable[..., None], *, seconds: float
) -> None:
    """Run a check of the layouts of each step, steps of as many ranks one after the other in the same processes.

    Raises:
        AssertionError: its text says ``what`` it is about, on which layouts, and what the check said.
    """
    of_ranks: dict[int, list[Sequence[LayoutT]]] = {}
    for layouts in steps:
        of_ranks.setdefault(layouts[0].ranks, []).append(layouts)
    for ranks, every in of_ranks.items():
        said = run_ranks(ranks, partial(_look, check, every), seconds=seconds)
        if wrong := next(filter(None, said), None):
            msg = f"{what} {wrong}"
            raise AssertionError(msg)


def check_initial_values(found: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Refuse initial values that are not, bit for bit, those of the whole module."""
    for name, value in whole.items():
        if name not in found or not torch.equal(found[name], value):
            raise BrokenError(f"the initial value of parameter {name!r} is not that of the whole module")


def check_copies(built: BuiltParts) -> None:
    """Refuse gradients that some ranks lack, and copies on tensor ranks that differ, which would drift apart."""
    layout, mine = built.layout, {name: _digest(one) for name, one in built.pieces().items()}
    everyones = all_gather_json(mine) if layout.ranks > 1 else [mine]
    first = built.axes.lane * layout.cp * layout.tp
    lane = everyones[first:][: layout.cp * layout.tp]
    for one in lane:
        if one.keys() != mine.keys():
            raise BrokenError(f"some ranks alone have gradients of parameters {sorted(one.keys() ^ mine.keys())}")
    copies = lane[built.axes.context.rank * layout.tp :][: layout.tp]
    for part in built.parts:
        for path, _ in part.module.named_parameters():
            split = part.splits[f"{part.name}.{path}"]
            if path not in mine or split.dim is not None or split.summed or split.experts:
                continue
            if any(one[path] != mine[path] for one in copies):
                raise BrokenError(f"the gradient of parameter {path!r} is not the same on all tensor ranks")


def check_same_bits(found: BuiltParts, other: BuiltParts) -> None:
    """Refuse gradients that are not bit for bit those of a layout that cuts weights and rows in the same way."""
    pieces, wanted = found.pieces(), other.pieces()
    if pieces.keys() != wanted.keys():
        raise BrokenError(f"other parameters have gradients: {sorted(pieces.keys() ^ wanted.keys())}")
    for name, gradient in wanted.items():
        if not torch.equal(pieces[name], gradient):
            raise BrokenError(f"the gradient of parameter {name!r} is not to the bit that on {other.layout}")


def _look(check: Callable[..., None], steps: Sequence[Sequence[LayoutT]]) -> str | None:
    for layouts in steps:
        try:
            check(*layouts)
        except BrokenError as how:
            return f"on {', then '.join(map(str, layouts))}: {how}"
    return None


def _digest(gradient: Tensor) -> str:
    """Return what two tensors have in common if their elements are equal: minus zero is zero."""
    data = (gradient.detach().cpu().contiguous() + 0).flatten().view(torch.uint8)
    found = hashlib.blake2b(f"{gradient.dtype} {[*gradient.shape]}".encode(), digest_size=16)
    found.update(ctypes.string_at(data.data_ptr(), len(data)))
    return found.hexdigest()
