"""Who reads the parameters of a stage, and when: its layers, each of which waits for its own before it runs.

`prepare` makes the `Readers` of a stage and ties them to the parameters that it hands to the optimizer; `build`, which
is given nothing but these, finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

from mimo.hooks import ConfigError
from mimo.optimizer import ModuleParameters, Phase, Prepared
from mimo_optimizer_distributed.units import layers as layers_of
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

if TYPE_CHECKING:
    from mimo_optimizer_hybrid._plugin import HybridConfig

_ATTRIBUTE = "_mimo_hybrid_readers"


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
        own = {parameter: name for name, parameter in part.parameters.items()}
        self._stages: list[tuple[_Reader, list[_Reader]]] = []
        for module in part.modules:
            layers = [_Reader(layer, _names(layer, own)) for layer in layers_of(module)]
            inside = {name for layer in layers for name in layer.names}
            rest = tuple(name for name in _names(module, own) if name not in inside)
            self._stages.append((_Reader(module, rest), [layer for layer in layers if layer.names]))
        self._parameters = part.parameters
        self._optimizers: list[HybridDeviceOptimizer] = []
        self._is_reduced = False
        self._waits: dict[tuple[str, ...], list[Callable[[], None]]] = {}

    def prepared(self, inner: Prepared) -> Prepared:
        """Return how the parameters lie, with the optimizer told what it needs to know.

        Args:
            inner: how they lie.
        """
        for parameter in {**self._parameters, **(inner.parameters or {})}.values():
            setattr(parameter, _ATTRIBUTE, self)
        if inner.parameters is None:
            for stage, layers in self._stages:
                stage.module.register_forward_pre_hook(_hook_of_stage(stage, layers), prepend=True)
                for layer in layers:
                    layer.module.register_forward_pre_hook(_hook_of_layer(layer), prepend=True)
            return attrs.evolve(inner, reduce=self._reducing(inner), settle=self._settling(inner))

        whole = tuple(name for name in self._parameters if name not in (inner.parameters or {}))

        @contextmanager
        def computing(phase: Phase) -> Iterator[None]:
            self.wait(whole)
            with inner.computing(phase):
                yield

        return attrs.evolve(inner, reduce=self._reducing(inner), settle=self._settling(inner), computing=computing)

    def wait(self, names: Collection[str]) -> None:
        """Wait for some parameters, before their pieces are gathered or what is whole here is read."""
        key = tuple(names)
        if key not in self._waits:
            self._waits[key] = [optimizer.waiter(key) for optimizer in self._optimizers]
        for wait in self._waits[key]:
            wait()

    def _reducing(self, inner: Prepared) -> Callable[[], None]:
        def reduce() -> None:
            inner.reduce()
            for optimizer in self._optimizers:
                optimizer.gradients_final(self._parameters)
            self._is_reduced = True

        return reduce

    def _settling(self, inner: Prepared) -> Callable[[], None]:
        def settle() -> None:
            # One call after a reduction is the step's own. Around any other, values may have been written.
            for optimizer in self._optimizers:
                optimizer.wait_all()
                if not self._is_reduced:
                    optimizer.distrust()
            self._is_reduced = False
            inner.settle()

        return settle

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


def build(parameters: Mapping[str, nn.Parameter], config: HybridConfig) -> HybridDeviceOptimizer:
    """Return the optimizer of parameters; it overlaps with the next forward if all their readers are known to wait.

    Args:
        parameters: by full name; those that another plugin has laid out are known to nobody.
        config: the plugin's.

    Raises:
        ConfigError: host memory cannot hold the module's share.
    """
    known: dict[Readers, None] = {}
    for parameter in parameters.values():
        readers = getattr(parameter, _ATTRIBUTE, None)
        if isinstance(readers, Readers):
            known[readers] = None
    order = [name for readers in known for name in readers.order if name in parameters]
    names = dict.fromkeys([*order, *parameters])
    try:
        optimizer = HybridDeviceOptimizer(
            {name: parameters[name] for name in names},
            fraction=config.fraction,
            bucket_bytes=config.bucket_bytes,
            staging_bytes=config.staging_bytes,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            overlaps=config.overlap and set(order) == parameters.keys(),
        )
    except ConfigError as error:
        module = next(iter(parameters)).partition(".")[0]
        raise ConfigError(
            f"modules.{module}.optimizer.fraction", expected=error.expected, got=error.got, fix=error.fix
        ) from error
    for readers in known:
        readers.attach(optimizer)
    return optimizer


def _names(module: nn.Module, own: Mapping[nn.Parameter, str]) -> tuple[str, ...]:
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
