"""Recomputation: chosen methods save only their inputs, and backward computes the rest again.

PyTorch's checkpoints, without their random numbers: layers draw by keys of rows, which are set once more. Collectives
inside are repeated by all ranks of their groups: a method is computed again up to the last tensor that it saves, which
is the same place on every rank as long as no rank saves fewer tensors because it has fewer rows. Rows go to the experts
that they went to, and nothing is exchanged or waited for to say how many they are (`Decisions`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimo.hooks import PluginError
from mimo.model.draws import DrawKeys
from mimo.model.parallel import Decisions


def recompute(methods: Iterable[Callable[..., Any]], *, name: str, keys: DrawKeys) -> None:
    """Make each method compute again in backward what it would otherwise save.

    Args:
        methods: bound methods of submodules, ``layer.forward`` for all of a layer.
        name: of the module in the model.
        keys: by which its layers draw.

    Raises:
        PluginError: one is not a method of a submodule.
    """
    for part, method in check_methods(methods, name=name):
        setattr(part, "draw_keys", keys)  # noqa: B010 - what `ReadsDrawKeys` says, and no type
        part.__class__ = _again_class(cast("Any", type(part)), method.__name__, method)


def check_methods(
    methods: Iterable[Callable[..., Any]], *, name: str
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield of each bound method its submodule and its function.

    Raises:
        PluginError: see `recompute`.
    """
    for method in methods:
        if not (isinstance(method, MethodType) and isinstance(method.__self__, nn.Module)):
            raise PluginError(
                f"modules.{name}.plugin",
                expected="a recompute that names bound methods of submodules",
                got=f"one of type {type(method).__name__}",
                fix="Return layer.forward, say, of each layer.",
            )
        yield method.__self__, method.__func__


@functools.cache
def _again_class(original: type[Any], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """Return a class with another method: an attribute of a module would be a circle of references."""
    return type(original.__name__, (original,), {name: _again(method)})


def _again(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(part: nn.Module, *given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return method(part, *given, **named)
        repeated = method if torch.compiler.is_compiling() else _repeatable(method, part)
        return checkpoint(repeated, part, *given, use_reentrant=False, preserve_rng_state=False, **named)

    return run


def _repeatable(method: Callable[..., Any], part: Any) -> Callable[..., Any]:
    """Return the method with the keys of now, and what it decides first, whenever it runs.

    In a graph keys are values like any others, and nothing is decided.
    """
    keys: DrawKeys = part.draw_keys
    drawn, decisions = keys.now, Decisions()

    def run(*given: Any, **named: Any) -> Any:
        with keys.at(drawn), decisions.at():
            return method(*given, **named)

    return run
