"""Compilation of a module's layers by ``torch.compile``, one by one (as in TorchTitan, arXiv:2410.06511).

Layers of one class share their graph, in which the number of rows is a symbol. What takes other steps for other
batches is one node of it: attention, the collectives of tensor ranks; or is left out: see `StaysEager`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._triton import has_triton

from mimo.hooks import ConfigError
from mimo.model.build.recompute import check_methods
from mimo.model.draws import DrawKeys
from mimo.model.graphs import ForGraphs
from mimo.model.layers import DefersWeightGrads, WeightGradQueue
from mimo.model.spec import ModuleSpec, StaysEager

_MAX_GRAPHS = 64
"""Of one method, before PyTorch gives up: of stages other parts are trained, and evaluation has graphs of its own."""


class _Eagerly:
    """In the place of an argument with which a layer is not compiled."""


@attrs.frozen(kw_only=True)
class Compilation:
    """What of a module is compiled.

    Args:
        layers: how many of its layers are, by the name of their class; none of a module that stays eager.
        eager: what stays eager inside of these or, by the empty name, all of it, and why.
    """

    layers: Mapping[str, int]
    eager: Mapping[str, str]


def compilation_of(spec: ModuleSpec, module: nn.Module, *, name: str) -> Compilation:
    """Return what of a module would be compiled.

    Args:
        spec: its plugin, whose ``recompute["full"]`` says which its layers are.
        module: all of it, or a stage.
        name: of the module in the model.

    Raises:
        PluginError: what ``spec`` calls a layer is none.
    """
    if not spec.compiles:
        return Compilation(layers={}, eager={"": f"the plugin {spec.name!r} says that its layers can't be compiled"})
    if "full" not in spec.recompute:
        return Compilation(layers={}, eager={"": f"the plugin {spec.name!r} names no layers, by recompute['full']"})
    try:
        layers = [part for part, _ in check_methods(spec.recompute["full"](module), name=name)]
    except ConfigError as error:
        return Compilation(layers={}, eager={"": f"the plugin {spec.name!r} finds no layers: {error}"})
    eager = {type(part).__name__: why for layer in layers for part, why in _eager_parts(layer)}
    compiled = Counter(type(layer).__name__ for layer in layers if not isinstance(layer, StaysEager))
    return Compilation(
        layers=dict(compiled), eager=eager if compiled else {"": "; ".join(dict.fromkeys(eager.values()))}
    )


def _eager_parts(part: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the outermost parts that stay eager, a layer itself among them, and why."""
    if isinstance(part, StaysEager):
        yield part, part.stays_eager
        return
    for child in part.children():
        yield from _eager_parts(child)


def compile_layers(
    spec: ModuleSpec,
    module: nn.Module,
    *,
    backend: str,
    name: str,
    keys: DrawKeys,
    queue: WeightGradQueue | None = None,
) -> None:
    """Have the layers of a stage be compiled when they first run.

    Args:
        spec: the module's plugin.
        module: the stage.
        backend: of ``torch.compile``.
        name: of the module in the model.
        keys: by which its layers draw.
        queue: where its layers defer weight gradients, None where backwards are not split.

    Raises:
        PluginError: what ``spec`` calls a layer is none.
    """
    if not compilation_of(spec, module, name=name).layers:
        return
    config = torch._dynamo.config  # noqa: SLF001 - public, but for its name
    config.recompile_limit = max(config.recompile_limit, _MAX_GRAPHS)
    for layer, method in check_methods(spec.recompute["full"](module), name=name):
        for part, why in _eager_parts(layer):
            part.__class__ = _eager_class(cast("Any", type(part)), why)
        if isinstance(layer, StaysEager):
            continue
        if queue is not None:
            setattr(layer, "weight_grad_queue", queue)  # noqa: B010 - what `DefersWeightGrads` says, and no type
        setattr(layer, "draw_keys", keys)  # noqa: B010 - likewise
        layer.__class__ = _compiled_class(cast("Any", type(layer)), method.__name__, method, backend)


@functools.cache
def _eager_class(original: type[Any], why: str) -> type[nn.Module]:
    forward = torch.compiler.disable(original.forward, reason=f"{original.__name__} stays eager, as {why}")
    return type(original.__name__, (original,), {"forward": forward})


@functools.cache
def _compiled_class(original: type[Any], name: str, method: Callable[..., Any], backend: str) -> type[nn.Module]:
    return type(original.__name__, (original,), {name: _compiled(method, backend)})


def _compiled(method: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def drawing(part: Any, keys: Tensor, *given: Any, **named: Any) -> Any:
        part.draw_keys.rows = keys  # as they are: by argument their number is a symbol, as that of the rows
        return method(part, *given, **named)

    # A graph that ends inside of the method takes one more where that is called by another.
    compiled, compiled_drawing = (torch.compile(one, backend=backend, dynamic=True) for one in (method, drawing))

    @functools.wraps(method)
    def run(part: nn.Module, *given: Any, **named: Any) -> Any:
        values, names = tuple(map(_in_graphs, given)), {name: _in_graphs(one) for name, one in named.items()}
        if any(one is _Eagerly for one in (*values, *names.values())):
            return method(part, *given, **named)
        if isinstance(part, DefersWeightGrads) and part.weight_grad_queue is not None:
            part.weight_grad_queue.know(part)
        keys: DrawKeys = cast("Any", part).draw_keys
        try:
            if keys.rows is None:
                return compiled(part, *values, **names)
            return compiled_drawing(part, keys.rows, *values, **names)
        except TorchDynamoException as error:  # of the compiler; what a layer itself raises is none
            why = " ".join(str(error).splitlines()[:2])
            raise ConfigError(
                "run.compile",
                expected=f"layers that PyTorch can compile with {backend!r}",
                got=f"{type(error).__name__} for {type(part).__name__}: {why}",
                fix="Set it to false; a plugin says by compiles = False that its layers can't be compiled.",
            ) from error

    return run


def _in_graphs(one: Any) -> Any:
    """Return what a graph takes for an argument, `_Eagerly` where it takes none: of no rows it would be another one."""
    if isinstance(one, Tensor):
        return one if one.numel() else _Eagerly
    if not isinstance(one, ForGraphs):
        return one
    found = one.for_graphs()
    return _Eagerly if found is None else found


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that finds nothing here to compile with.

    Raises:
        ConfigError: naming ``run.compile``.
    """
    if backend != "inductor":
        return
    needed, found = ("the package triton", has_triton) if device.type == "cuda" else ("a C++ compiler", _has_compiler)
    if not found():
        raise ConfigError(
            "run.compile",
            expected=f"{needed}, with which 'inductor' compiles for {device.type}",
            got="none on this machine",
            fix="Install it, or set run.compile to false.",
        )


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
