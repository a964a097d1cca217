"""What trials of encoders have in common: what they check of a thin one, and what is found of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import JsonNode, UserError
from mimo.model.runtime import DrawKeys, Split, TensorAxis, attach_draws
from mimo_transformers.model.small import trying
from mimo_transformers.trial.record import Form
from mimo_transformers.trial.tensor_plan import Heads, TensorPlan, split_linears

_TOLERANCE = 1e-5
_PATH = re.compile(r"[\w*]+(\.[\w*]+)*")


@attrs.frozen(kw_only=True)
class Tried:
    """What a trial has found.

    Args:
        problem: why it can't be trained, empty if it can.
        idle: paths in the library's model of parameters on which nothing depends that is handed on.
        constants: what begins with the same number everywhere, by general path.
    """

    problem: str = ""
    idle: frozenset[str] = frozenset()
    constants: Mapping[str, float] = attrs.field(factory=dict)


TriedT = TypeVar("TriedT", bound=Tried)


class UnfitError(Exception):
    """A thin encoder can't be trained; the message says why."""


def try_encoder(find: Callable[[], TriedT], result: Callable[..., TriedT]) -> TriedT:
    """Return what a trial finds, or ``result`` with the problem for which it failed."""
    try:
        with trying():
            return find()
    except (UserError, UnfitError) as error:
        return result(problem=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does
        return result(problem=f"a thin one that fails with {type(error).__name__}: {error}")


def check_rows(encoder: nn.Module, run: Callable[[], Tensor], wanted: Tensor) -> None:
    """Refuse an encoder that doesn't make these rows of images in a batch, or does more than that.

    Args:
        encoder: which.
        run: makes the rows.
        wanted: as the library makes them of each image alone.

    Raises:
        UnfitError: saying what it does.
    """
    fixed = {name: tensor.clone() for name, tensor in _fixed_tensors(encoder)}
    chance = torch.get_rng_state()
    found = run()
    if not torch.equal(chance, torch.get_rng_state()):
        raise UnfitError("a thin one draws random numbers while it trains")
    if found.shape != wanted.shape:
        raise UnfitError(f"rows of a thin one of the shape {tuple(found.shape)} in a batch of images")
    check_same(found, wanted)
    if changed := [name for name, tensor in _fixed_tensors(encoder) if not torch.equal(tensor, fixed[name])]:
        raise UnfitError(f"{', '.join(changed)} of a thin one that change while it trains")


def draw_in(encoder: nn.Module) -> DrawKeys:
    """Return keys by which an encoder drops what it does in a step, once they are given some."""
    keys = DrawKeys(module="encoder")
    attach_draws(encoder, keys, device=torch.device("cpu"), draws=lambda _path: True)
    return keys


def check_same(found: Tensor, wanted: Tensor, how: str = "") -> None:
    """Refuse an encoder whose rows of images in a batch aren't those of each image alone.

    Args:
        found: rows in a batch.
        wanted: of each alone.
        how: more words on how they were made.

    Raises:
        UnfitError: saying by how much they differ.
    """
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE:
        raise UnfitError(f"rows of a thin one that differ by {difference:.1e} in a batch of images{how}")


def idle_in(module: nn.Module, run: Callable[[], Tensor]) -> Iterator[str]:
    """Yield the paths of parameters of a module on which none of the rows that ``run`` makes depends."""
    with torch.enable_grad():
        rows = run()
        (rows * torch.randn_like(rows)).sum().backward()
    yield from (path for path, parameter in module.named_parameters() if parameter.grad is None)


def _fixed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what nothing trains: buffers, and those that have become parameters since they are saved."""
    yield from module.named_buffers()
    yield from ((name, one.detach()) for name, one in module.named_parameters() if not one.requires_grad)


def encoder_splits(module: nn.Module, axis: TensorAxis, plan: TensorPlan) -> dict[str, Split]:
    """Hand ``axis`` to the tower of an encoder, its part ``encoder``, and return how its parameters lie."""
    return split_linears(module.get_submodule("encoder"), axis, plan, heads=Heads(), at="encoder")


def read_paths(node: JsonNode) -> frozenset[str]:
    """Return paths of parameters.

    Raises:
        UserError: one is none.
    """
    for one in node.list():
        if not _PATH.fullmatch(one.text()):
            raise one.fail("a path of a parameter")
    return frozenset(node.value)


def read_constants(node: JsonNode) -> dict[str, float]:
    """Return numbers by the paths of parameters.

    Raises:
        UserError: one is none.
    """
    for path, one in node.items():
        if not _PATH.fullmatch(path) or type(one.value) is not float or not math.isfinite(one.value):
            raise one.fail("a number of a parameter")
    return dict(node.value)


def _read(node: JsonNode) -> Tried:
    said = node.fields(("idle", "constants"))
    return Tried(idle=read_paths(said["idle"]), constants=read_constants(said["constants"]))


def write_tried(tried: Tried) -> dict[str, object] | None:
    """Return what was found of an encoder that can be trained, as plain data."""
    if tried.problem:
        return None
    return {"idle": sorted(tried.idle), "constants": dict(tried.constants)}


TRIED = Form(write=write_tried, read=_read)
