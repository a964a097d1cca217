"""Makes modules of the library such as ours are: parallel parts inside, initial values drawn by each for itself."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from mimo_transformers.model.experts import BridgedExperts, BridgedGroupedLinear, is_experts
from mimo_transformers.model.modules import (
    BridgedEmbedding,
    BridgedLinear,
    Constant,
    Draw,
    draws_by_itself,
    fill_buffers,
    without_contents,
)
from mimo_transformers.model.small import general


def replace(layers: nn.Module, draw: Draw, *, weights: Collection[tuple[type[nn.Module], str]] = ()) -> None:
    """Put parts of ours in the place of the library's, which know of parallel ranks and deferred weight gradients.

    Args:
        layers: of the library.
        draw: its initial values.
        weights: linears of which nothing but the weight is used, by the class of what holds them and their name there.
    """
    for part in list(layers.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and (type(part), name) not in weights:
                setattr(part, name, BridgedLinear(child, draw))
            elif is_experts(child):
                setattr(part, name, BridgedExperts(child, draw))


def make_own(module: nn.Module, draw: Draw, constant: Constant, paths: Mapping[nn.Module, str]) -> None:
    """Let every part of a module draw its own parameters, and have the values of its buffers.

    Buffers that are saved become parameters that aren't trained: the bias by which a router chooses, for example. Those
    of whole numbers follow from the config, and aren't saved here.
    """
    blank = _blank(module, torch.device("meta"))
    for path, part in module.named_modules():
        if isinstance(part, BridgedLinear | BridgedEmbedding | BridgedGroupedLinear):
            continue
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:  # noqa: SLF001 - PyTorch says it nowhere else
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
            elif not buffer.is_floating_point():
                part._non_persistent_buffers_set.add(name)  # noqa: SLF001 - likewise
        own = partial(_at, constant, general(paths.get(part, "")))
        fill_buffers(part, draw, own)
        if any(True for _ in part.parameters(recurse=False)):
            above, _, name = path.rpartition(".")
            around = blank.get_submodule(above) if path else None
            by_itself = partial(_draw_own, draw, blank.get_submodule(path), around, name)
            draws_by_itself(part, by_itself, own)


def record_whole_layers(tower: Any, layers: Iterable[nn.Module]) -> None:
    """Have the library record what layers of a tower return, if that, and nothing inside of them.

    It has a hook in each attention, and where that asks whether to record, a graph of a compiled layer would end.
    """
    with suppress(ImportError):  # releases without such hooks
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        maybe_install_capturing_hooks(tower)
    for layer in layers:
        for part in set(layer.modules()) - {layer}:
            part._forward_hooks.clear()  # noqa: SLF001 - PyTorch gives handles to those alone who add hooks


def _at(constant: Constant, path: str, leaf: str) -> float | None:
    return constant(f"{path}.{leaf}")


def _draw_own(draw: Draw, blank: nn.Module, around: nn.Module | None, name: str, part: nn.Module) -> None:
    """Draw what a part itself holds, and nothing of what lies inside of it, which draws for itself.

    Args:
        draw: as the library does.
        blank: the part without values, at full shapes.
        around: likewise what it lies in, which draws it if the part doesn't.
        name: of the part there.
        part: to draw.
    """
    own = [one for one in part.parameters(recurse=False) if one.is_floating_point()]
    shell = copy.copy(part)
    vars(shell)["_modules"] = {path: _blank(one, own[0].device) for path, one in blank.named_children()}
    draw(shell)
    if around is not None and any(not one.is_meta and bool(one.isnan().any()) for one in own):
        whole = _blank(around, own[0].device)
        vars(whole)["_modules"][name] = part
        with suppress(AttributeError):
            draw(whole)


def _blank(module: nn.Module, device: torch.device) -> Any:
    """Return a copy of a module with parameters of its shapes and no values."""
    shell = without_contents(module)
    for name, one in vars(module)["_parameters"].items():
        made = None if one is None else nn.Parameter(torch.empty(one.shape, device=device), requires_grad=False)
        vars(shell)["_parameters"][name] = made
    vars(shell)["_modules"] = {name: _blank(child, device) for name, child in module.named_children()}
    return shell
