"""Checks of a module of any kind, with whatever it is given to compute: values, gradients, state, what is frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model.build import check_module, is_frozen
from mimo.model.build.hf import read_hf, write_hf
from mimo.model.build.part import Part
from mimo.model.build.trainable import build_stage
from mimo.model.spec import EncoderSpec, GeneratorSpec, HfFamily, ModuleSpec, Stage, hf_families
from mimo.model.testing.built import BuiltParts, Layout
from mimo.model.testing.checks import BrokenError, SkippedError
from mimo.model.testing.compare import compare_rows
from mimo.topology.meshes import gradient_of

BuiltT = TypeVar("BuiltT", bound=BuiltParts)


class AnySubject(Protocol[BuiltT]):
    """A plugin with its config, and something to compute."""

    @property
    def spec(self) -> ModuleSpec:
        """The plugin."""

    @property
    def config(self) -> Any:
        """An instance of its config class."""

    @property
    def hidden(self) -> int | None:
        """Width of the rows that it is built for; None for a language model, which has its own."""

    def layout(self, **changes: Any) -> Any:
        """Return the layout of the whole module, with fields changed."""

    def build(self, layout: Any = None, *, stirred: bool = True) -> BuiltT:
        """Build the module in a layout, on this rank alone if None; see `BuiltParts.stir` for ``stirred``."""

    def rows(self, built: BuiltT) -> Tensor:
        """Return its rows of all that there is to compute."""

    def learn(self, built: BuiltT) -> None:
        """Take the gradients of the same, once."""


class ItemSubject(Protocol):
    """A plugin that reads or makes items, with its config, and some of them."""

    @property
    def spec(self) -> EncoderSpec | GeneratorSpec:
        """The plugin."""

    @property
    def config(self) -> Any:
        """An instance of its config class."""

    @property
    def raw(self) -> Sequence[Any]:
        """Items as a dataset hands them in."""

    def sizes(self) -> list[tuple[int, ...]]:
        """Return the items' header sizes."""


def check_chance(subject: AnySubject[BuiltT]) -> None:
    """forward() draws no random numbers, which would differ by layout."""
    built = subject.build()
    before = torch.get_rng_state()
    first = subject.rows(built).detach()
    if not torch.equal(before, torch.get_rng_state()):
        raise BrokenError("it drew from torch's generator")
    compare_rows(subject.rows(built), first, "rows of a second call", "those of the first")


def check_gradients(subject: AnySubject[BuiltT]) -> None:
    """Every parameter learns from what the kit computes, unless it asks for no gradient."""
    built = subject.build()
    subject.learn(built)
    gradients = built.gradients()
    for name, parameter in built.parameters.items():
        if not parameter.requires_grad:
            continue
        if name not in gradients:
            raise BrokenError(f"parameter {name!r} got no gradient; requires_grad_(False) says that it is not to learn")
        if not bool(torch.isfinite(gradients[name]).all()):
            raise BrokenError(f"the gradient of parameter {name!r} is not finite")
        if not bool(gradients[name].any()):
            raise BrokenError(f"the gradient of parameter {name!r} is all zeros")


def check_initial(subject: AnySubject[BuiltT]) -> None:
    """Initial values follow from the run's seed alone, and are others with another seed."""
    torch.manual_seed(3)
    first = subject.build(stirred=False)
    torch.manual_seed(4)
    again, other = subject.build(stirred=False), subject.build(subject.layout(seed=2), stirred=False)
    for name, value in (first.values() | first.buffers).items():
        if not torch.equal(value, (again.values() | again.buffers)[name]):
            raise BrokenError(f"{name!r} differs between two modules of one seed")
    values = other.values()
    if values and all(torch.equal(value, values[name]) for name, value in first.values().items()):
        raise BrokenError("no parameter differs between two seeds")


def check_saved(subject: AnySubject[BuiltT]) -> None:
    """Parameters and persistent buffers are all that a module knows: loaded into another one, it computes the same."""
    one, other = subject.build(), subject.build(subject.layout(seed=2))
    for source, target in zip(one.parts, other.parts, strict=True):
        with torch.no_grad():
            for name, parameter in target.parameters.items():
                parameter.copy_(source.parameters[name])
            for name, buffer in target.buffers.items():
                buffer.copy_(source.buffers[name])
    compare_rows(subject.rows(other), subject.rows(one).detach(), "rows after loading", "those before")


def check_published(subject: AnySubject[BuiltT]) -> None:
    """Weights that are written as a family publishes them come back as they were, under names of their own."""
    families = hf_families(subject.spec, subject.config)
    if not families:
        raise SkippedError("the spec has no tables of published weights")
    refused = [str(reason) for family in families if (reason := _check_family(subject, family)) is not None]
    if len(refused) == len(families):
        raise SkippedError(f"no family has a place for these settings: {refused[0]}")


def _check_family(subject: AnySubject[BuiltT], family: HfFamily) -> ConfigError | None:
    """Write weights and read them again; return why the family has none such."""
    try:
        family.describe(subject.config)
    except ConfigError as reason:
        return reason
    one, other = (build_stage(subject.spec, subject.config, Stage(), subject.hidden) for _ in range(2))
    _number(one)
    written = write_hf(one, family, subject.config)
    if not written:
        raise BrokenError(f"the table of {family.model_type!r} is empty")
    left = read_hf(other, family, subject.config, written)
    values = dict(one.named_parameters())
    for name, value in other.named_parameters():
        if name not in left and not torch.equal(value, values[name]):
            raise BrokenError(f"{name!r} written and read by the table of {family.model_type!r} is another")
    return None


@torch.no_grad()
def _number(module: nn.Module) -> None:
    """Give every element a number that no other of its parameter has, where a fresh module's may be equal."""
    for count, parameter in enumerate(module.parameters()):
        parameter.copy_(torch.arange(1, parameter.numel() + 1).view(parameter.shape) + count)


def check_frozen(subject: AnySubject[BuiltT], parts: Iterable[str]) -> None:
    """Refuse gradients of a frozen part, and parts that stop the gradients of others.

    Raises:
        BrokenError: naming the parameter.
    """
    for part in parts:
        frozen = frozenset({part})
        built = subject.build(subject.layout(frozen=frozen))
        subject.learn(built)
        named = [name for name in built.parameters if is_frozen(subject.spec, name, frozen)]
        if not named:
            raise BrokenError(f"no parameter lies in part {part!r}")
        for name, parameter in built.parameters.items():
            if gradient_of(parameter) is not None and name in named:
                raise BrokenError(f"parameter {name!r} of the frozen part {part!r} got a gradient")
            if gradient_of(parameter) is None and parameter.requires_grad:
                raise BrokenError(f"parameter {name!r} got no gradient where only part {part!r} is frozen")


def held_parts(spec: ModuleSpec, part: Part) -> set[str]:
    """Return the names of the spec's parts of which a stage has parameters."""
    paths = [path for path, _ in part.module.named_parameters()]
    return {name for name in spec.parts if any(is_frozen(spec, path, frozenset({name})) for path in paths)}


def refuse_layout(subject: AnySubject[BuiltT], name: str, layout: Layout) -> None:
    """Leave out a layout that the plugin can't have with these settings.

    Raises:
        SkippedError: saying why.
    """
    try:
        check_module(subject.spec, subject.config, grid=layout.grid(name), sequence_parallel=layout.sequence_parallel)
    except ConfigError as error:
        raise SkippedError(f"these settings can't: {error}") from error
