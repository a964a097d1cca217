"""Makes modules of the library such as ours are: parallel parts inside, initial values drawn by each for itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from mimo_transformers.model.experts import BridgedExperts, BridgedGroupedLinear, is_experts
from mimo_transformers.model.modules import (
    BridgedEmbedding,
    BridgedLinear,
    Constant,
    Draw,
    drawn_by,
    fill_buffers,
)
from mimo_transformers.model.small import general


def replace(layers: nn.Module, draw: Draw) -> None:
    """Put parts of ours in the place of the library's, which know of parallel ranks and deferred weight gradients."""
    for part in list(layers.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear:
                setattr(part, name, BridgedLinear(child, draw))
            elif is_experts(child):
                setattr(part, name, BridgedExperts(child, draw))


def make_own(module: nn.Module, draw: Draw, constant: Constant, paths: Mapping[nn.Module, str]) -> None:
    """Let every part of a module draw its own parameters, and have the values of its buffers.

    Buffers that are saved become parameters that aren't trained: the bias by which a router chooses, for example.
    """
    for part in module.modules():
        if isinstance(part, BridgedLinear | BridgedEmbedding | BridgedGroupedLinear):
            continue
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:  # noqa: SLF001 - PyTorch says it nowhere else
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
        own = partial(_at, constant, general(paths.get(part, "")))
        fill_buffers(part, draw, own)
        if any(True for _ in part.parameters(recurse=False)):
            part.__class__ = drawn_by(draw, type(part), own)


def _at(constant: Constant, path: str, leaf: str) -> float | None:
    return constant(f"{path}.{leaf}")
