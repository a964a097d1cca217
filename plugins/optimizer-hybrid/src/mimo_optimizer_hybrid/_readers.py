"""Who reads the parameters of a stage, and when: its layers, each of which waits for its own before it runs.

The plugin's ``prepare`` makes the `Readers` of a stage and hands them on in what it returns, where its ``agree`` finds
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from mimo.optimizer import Access, ModuleParameters, Phase, Prepared
from mimo.optimizer.runtime import layers as layers_of
from mimo.topology.meshes import local
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer


@attrs.frozen
class Read(Prepared):
    """How parameters lie, and who reads them."""

    readers: Readers | None = None


def readers_of(prepared: Iterable[Prepared]) -> tuple[Readers, ...]:
    """Return who reads what this plugin has laid out."""
    return tuple(one.readers for one in prepared if isinstance(one, Read) and one.readers is not None)


@attrs.define(eq=False)
class _Reader:
    """A module, the parameters that only it reads, and whether its forward has ever been seen to run."""

    module: nn.Module
    names: tuple[str, ...]
    waits: list[Callable[[], None]] = attrs.field(factory=list)
    has_run: bool = False

    def wait(self) -> None:
        """Wait for its parameters."""
        for wait in self.waits:
            wait()


class Readers:
    """The layers of stages, which are members of lists of modules, and the stages, which read all other parameters.

    Make it before parameters are laid out: they are then still the modules' own. Those of a layer may be read only
    inside its own call, or, if it is never called, by anybody in its stage.

    Args:
        part: the stages, and which of their parameters train.
    """

    def __init__(self, part: ModuleParameters) -> None:
        own = {local(parameter): name for name, parameter in part.parameters.items()}
        self._stages: list[tuple[_Reader, list[_Reader]]] = []
        for module in part.modules:
            layers = [_Reader(layer, _names(layer, own)) for layer in layers_of(module)]
            inside = {name for layer in layers for name in layer.names}
            rest = tuple(name for name in _names(module, own) if name not in inside)
            self._stages.append((_Reader(module, rest), [layer for layer in layers if layer.names]))
        self._parameters = part.parameters
        self._optimizers: list[HybridDeviceOptimizer] = []
        self._waits: dict[tuple[str, ...], list[Callable[[], None]]] = {}

    def prepared(self, inner: Prepared) -> Read:
        """Return how the parameters lie, with what the optimizer needs to know.

        Args:
            inner: how they lie; it calls `wait` before it gathers any, and `reduced` when their gradients are final.
        """
        on_compute = inner.on_compute
        if inner.parameters is None:
            for stage, layers in self._stages:
                stage.module.register_forward_pre_hook(_hook_of_stage(stage, layers), prepend=True)
                for layer in layers:
                    layer.module.register_forward_pre_hook(_hook_of_layer(layer), prepend=True)
        else:
            on_compute = self._on_compute(inner, tuple(self._parameters.keys() - inner.parameters.keys()))
        own = {"on_compute": on_compute, "synchronize": self._synchronizing(inner), "readers": self}
        return Read(**{**attrs.asdict(inner, recurse=False), **own})

    def wait(self, names: Collection[str]) -> None:
        """Wait for some parameters, before their pieces are gathered or what is whole here is read."""
        key = tuple(names)
        if key not in self._waits:
            self._waits[key] = [optimizer.waiter(key) for optimizer in self._optimizers]
        for wait in self._waits[key]:
            wait()

    def reduced(self, names: Collection[str]) -> None:
        """Have gradients that are final copied down, whatever runs beside."""
        for optimizer in self._optimizers:
            optimizer.gradients_final(names)

    def _on_compute(self, inner: Prepared, whole: Collection[str]) -> Callable[[Phase], AbstractContextManager[None]]:
        """Return the bounds of a computation, which waits for what is not gathered."""

        @contextmanager
        def on_compute(phase: Phase) -> Iterator[None]:
            self.wait(whole)
            with inner.on_compute(phase):
                yield

        return on_compute

    def _synchronizing(self, inner: Prepared) -> Callable[[Access], None]:
        def synchronize(access: Access) -> None:
            for optimizer in self._optimizers:
                optimizer.wait_all()
                if access == "any":
                    optimizer.distrust()
            inner.synchronize(access)

        return synchronize

    @property
    def order(self) -> Iterator[str]:
        """The parameters in the order in which a forward waits for them."""
        for stage, layers in self._stages:
            for reader in (stage, *layers):
                yield from reader.names

    def attach(self, optimizer: HybridDeviceOptimizer) -> None:
        """Let them wait for what ``optimizer`` steps."""
        self._optimizers.append(optimizer)
        self._waits.clear()
        for stage, layers in self._stages:
            for reader in (stage, *layers):
                reader.waits.append(optimizer.waiter(reader.names))


def _names(module: nn.Module, own: Mapping[Tensor, str]) -> tuple[str, ...]:
    return tuple(own[parameter] for parameter in module.parameters() if parameter in own)


def _hook_of_layer(layer: _Reader) -> Callable[[nn.Module, Any], None]:
    def hook(_module: nn.Module, _inputs: Any) -> None:
        layer.has_run = True
        layer.wait()

    return hook


def _hook_of_stage(stage: _Reader, layers: Collection[_Reader]) -> Callable[[nn.Module, Any], None]:
    def hook(_module: nn.Module, _inputs: Any) -> None:
        stage.wait()
        for layer in layers:
            if not layer.has_run:  # nor may it ever: a stage may use what is in a list without calling it
                layer.wait()

    return hook
