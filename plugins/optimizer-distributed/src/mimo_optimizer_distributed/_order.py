"""The order in which a stage gathers its layers for each computation: the same on every lane, whatever it has to do.

A lane without a sample may run no layer, or have no graph to go back through. All lanes must still gather the same
layers in the same order. So there is one order: forward as the layers stand, backward the reverse. A lane that comes to
a layer first gathers, and lets go of, all those before it that it has passed by; at the end, all that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
    """

    def __init__(self, around: Sequence[Group], layers: Mapping[nn.Module, Sequence[Group]], *, name: str) -> None:
        self._around = tuple(around)
        self._layers = {layer: tuple(groups) for layer, groups in layers.items()}
        self._name = name
        self._phase: Phase | None = None
        self._order: tuple[nn.Module, ...] = ()
        self._next = 0
        for layer in self._layers:
            layer.register_forward_pre_hook(self._before, prepend=True)
            layer.register_forward_hook(self._after)

    @contextmanager
    def computing(self, phase: Phase) -> Iterator[None]:
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
        if all(group.is_gathered for group in groups) and layer in self._order[: self._next]:
            return  # its forward is computed again within its backward
        if layer in self._order[: self._next]:
            raise PluginError(
                f"modules.{self._name}.plugin",
                expected="layers that each run once in a forward, in the order in which they stand in their list, as "
                "optimizer.shard = 'full' gathers them in that order",
                got=f"a {type(layer).__name__} again, or after one that stands behind it",
                fix="Set optimizer.shard = 'gradients' for this module.",
            )
        while self._order[self._next] is not layer:
            self._pass_by()
        self._release_before(self._next)
        _gather(groups)
        self._next += 1
        if self._next < len(self._order):
            for group in self._layers[self._order[self._next]]:
                group.gather()

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

    def _after(self, layer: nn.Module, _given: Any, output: Any) -> None:
        if self._phase == "forward":
            _release(self._layers[layer])
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self._enter_backward(layer))

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


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a layer's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for one in output.values():
            yield from _tensors(one)
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _tensors(one)
