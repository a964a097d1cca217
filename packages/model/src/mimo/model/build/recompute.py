"""Recomputation: chosen methods save only their inputs, and backward computes the rest again.

PyTorch's checkpoints, without their random numbers, since no layer draws any. Collectives inside are repeated by all
ranks of their groups: a method is computed again up to the last tensor that it saves, which is the same place on every
rank as long as no rank saves fewer tensors because it has fewer rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimo.hooks import PluginError


def recompute(methods: Iterable[Callable[..., Any]], *, name: str) -> None:
    """Make each method compute again in backward what it would otherwise save.

    Args:
        methods: bound methods of submodules, ``layer.forward`` for all of a layer.
        name: of the module in the model.

    Raises:
        PluginError: one is not a method of a submodule.
    """
    for method in methods:
        if not (isinstance(method, MethodType) and isinstance(method.__self__, nn.Module)):
            raise PluginError(
                f"modules.{name}.plugin",
                expected="a recompute that names bound methods of submodules",
                got=f"one of type {type(method).__name__}",
                fix="Return layer.forward, say, of each layer.",
            )
        part = method.__self__
        original = type(part)
        # A class of its own, as in `read_locally`: an attribute would be a circle of references.
        part.__class__ = type(original.__name__, (original,), {method.__name__: _again(method.__func__)})


def _again(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(part: nn.Module, *given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return method(part, *given, **named)
        return checkpoint(method, part, *given, use_reentrant=False, preserve_rng_state=False, **named)

    return run
