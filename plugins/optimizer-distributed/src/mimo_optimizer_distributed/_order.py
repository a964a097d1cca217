"""The order in which a stage gathers its layers for each computation: the same on every lane, whatever it has to do.

A lane without a sample may run no layer, or have no graph to go back through. All lanes must still gather the same
layers in the same order. So there is one order: forward as the layers stand, backward the reverse. A lane that comes to
a layer first gathers, and lets go of, all those before it that it has passed by; at the end, all that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import PluginError
from mimo.optimizer import Phase
from mimo_optimizer_distributed._fsdp import Group


class Order:
    """Gathers groups for one stage's computations. It hooks into the layers.

    Args:
        around: what is gathered for all of a computation.
        layers: each with what is gathered for it alone.
        name: of the module in the model.
        ahead: whether the layer after the one that computes is gathered meanwhile.
    """

    def __init__(
        self, around: Sequence[Group], layers: Mapping[nn.Module, Sequence[Group]], *, name: str, ahead: bool
    ) -> None:
        self._around = tuple(around)
        self._layers = {layer: tuple(groups) for layer, groups in layers.items()}
        self._name = name
        self._ahead = ahead
        self._phase: Phase | None = None
        self._order: tuple[nn.Module, ...] = ()
        self._next = 0
        for layer in self._layers:
            layer.register_forward_pre_hook(self._before, prepend=True)
            layer.register_forward_hook(self._after)

    @contextmanager
    def on_compute(self, phase: Phase) -> Iterator[None]:
        """Gather during the context; leaving it by an error leaves the rest undone."""
        assert self._phase is None, "one computation of a stage at a time"
        self._phase, self._next = phase, 0
        self._order = tuple(self._layers)[:: 1 if phase == "forward" else -1]
        _gather(self._around)
        try:
            yield
            while self._next < len(self._order):
                self._pass_by()
            _release(self._around)
            self._release_before(len(self._order))
        finally:
            self._phase = None

    def _enter(self, layer: nn.Module) -> None:
        """Gather a layer whose turn has come, and let go of those before it."""
        groups = self._layers[layer]
        if layer in self._order[: self._next]:
            raise self._refused(
                "layers that each run once in a forward, in the order in which they stand in their list, as "
                "optimizer.shard = 'full' gathers them in that order",
                f"a {type(layer).__name__} again, or after one that stands behind it",
            )
        while self._order[self._next] is not layer:
            self._pass_by()
        self._release_before(self._next)
        _gather(groups)
        self._next += 1
        if self._ahead and self._next < len(self._order):
            for group in self._layers[self._order[self._next]]:
                group.gather()

    def _refused(self, expected: str, got: str) -> PluginError:
        return PluginError(
            f"modules.{self._name}.plugin",
            expected=expected,
            got=got,
            fix="Set optimizer.shard = 'gradients' for this module.",
        )

    def _pass_by(self) -> None:
        groups = self._layers[self._order[self._next]]
        _gather(groups)
        _release(groups)
        self._next += 1

    def _release_before(self, index: int) -> None:
        for layer in self._order[:index]:
            _release(self._layers[layer])

    def _before(self, layer: nn.Module, _given: Any) -> None:
        assert self._phase is not None, "parameters are gathered for computations of a stage only"
        if self._phase == "forward":
            self._enter(layer)
        elif self._order[self._next - 1 : self._next] != (layer,):
            raise self._refused(
                "layers that are computed again one at a time, each when its own gradients come, as optimizer.shard = "
                "'full' has gathered no other",
                f"a {type(layer).__name__} that is computed again before that",
            )

    def _after(self, layer: nn.Module, _given: Any, output: Any) -> Any:
        if self._phase != "forward":
            return output
        _release(self._layers[layer])

        def leave(rows: Tensor) -> Tensor:
            if not rows.requires_grad:
                return rows
            return cast("Tensor", _Leave.apply(partial(self._enter_backward, layer), rows))  # type: ignore[no-untyped-call]

        try:
            return _each_tensor(output, leave)
        except TypeError as error:
            raise self._refused(
                "layers that return tensors, or tuples, lists, dicts and data classes of them, as optimizer.shard = "
                "'full' follows their gradients back",
                f"a {type(layer).__name__} that returns a {error}",
            ) from error

    def _enter_backward(self, layer: nn.Module) -> None:
        """Gather a layer before the first of its outputs' gradients goes back through it."""
        if self._order[self._next - 1 : self._next] != (layer,):
            self._enter(layer)


def _gather(groups: Sequence[Group]) -> None:
    for group in groups:
        group.gather()
    for group in groups:
        group.wait()


def _release(groups: Sequence[Group]) -> None:
    for group in groups:
        if group.is_gathered:
            group.release()


class _Leave(torch.autograd.Function):
    """Tells when the first gradient comes back to a layer, by a node that is the layer's alone.

    A hook of the tensor would be another layer's too where one returns what it was given, and gone once the tensor, a
    view, is written to.
    """

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], rows: Tensor) -> Tensor:
        ctx.on_backward = on_backward
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.on_backward()
        return None, gradient


def _each_tensor(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return what a layer has returned, with every tensor changed.

    Raises:
        TypeError: it is nothing in which tensors can be found.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return {key: _each_tensor(one, change) for key, one in output.items()}
    if isinstance(output, (tuple, list)):
        values = [_each_tensor(one, change) for one in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, **_each_field(output, fields(output), change))
    if attrs.has(type(output)):
        return attrs.evolve(output, **_each_field(output, attrs.fields(type(output)), change))
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    raise TypeError(type(output).__name__)


def _each_field(output: Any, fields: Iterable[Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {field.name: _each_tensor(getattr(output, field.name), change) for field in fields if field.init}
