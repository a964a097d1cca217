"""The families of published models that installed plugins read, and what is known of each.

Free of torch until one is tried.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mimo.checkpoint import read_published_json
from mimo.hooks import ConfigError, UserError
from mimo.model import (
    PARALLEL_AXES,
    EncoderSpec,
    HfFamily,
    HfTested,
    LanguageModelSpec,
    ModuleSpec,
    noun_of,
    read_hf_tested,
    supported_axes,
)
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.config.structure import structure
from mimo.trainer.published.find import find_parts, unread_sections
from mimo.trainer.published.part import CONFIG_NAME, HfPart
from mimo.trainer.published.readers import installed_modules, readers_of

_EXPERT_AXES = {"ep", "etp"}


@attrs.frozen(kw_only=True)
class ReadFamily:
    """A family as one plugin reads it.

    Args:
        model_type: of its ``config.json``.
        plugin: name of the plugin; empty for a model in a folder that none reads.
        part: what it becomes: ``language``, an encoder's modality, or a generator's and that word: ``image generator``.
        first: whether this plugin reads it unless another one is named; a whole model is read by one that reads those.
        named: whether the plugin names it; of what it doesn't, a trial of the family has the last word.
        axes: along which it can be split beside lanes; None where only a trial knows.
        tested: what is recorded of a test beside its library.
    """

    model_type: str
    plugin: str
    part: str
    first: bool
    named: bool
    axes: tuple[str, ...] | None
    tested: HfTested | None = None

    @property
    def problem(self) -> str:
        """Why it can't be trained, as far as is recorded; empty for nothing."""
        return "" if self.tested is None else self.tested.problem

    @property
    def language(self) -> str:
        """Of a whole model that is read by an encoder's plugin, the one that was its language model where tested."""
        return "" if self.tested is None else self.tested.language


@attrs.frozen(kw_only=True)
class TriedFamily:
    """What a trial of a family by one plugin has found, of a folder or of a ``config.json`` without any keys.

    Args:
        read: the family.
        problem: why it can't be trained, empty if it can.
        refused: by axis, why it can't be split in two along that, empty if it can.
        untried: why nothing was tried, empty if it was; all else is as it is recorded then.
    """

    read: ReadFamily
    problem: str = ""
    refused: Mapping[str, str] = attrs.field(factory=dict)
    untried: str = ""


def read_families(specs: Iterable[ModuleSpec]) -> tuple[ReadFamily, ...]:
    """Return the families that plugins read, in order; of several plugins of one, that which comes first is first."""
    found: dict[str, list[ReadFamily]] = {}
    for spec in specs:
        for one in _families_of(spec):
            found.setdefault(one.model_type, []).append(one)
    return tuple(
        attrs.evolve(one, first=not place or bool(one.language))
        for model_type in sorted(found)
        for place, one in enumerate(sorted(found[model_type], key=lambda one: not one.named))
    )


def installed_families() -> tuple[ReadFamily, ...]:
    """Return the same of all that is installed."""
    return read_families(spec for _, spec in installed_modules(""))


def try_family(model_type: str) -> tuple[TriedFamily, ...]:
    """Return what each installed plugin that reads a family can do with it, tried now.

    Raises:
        ConfigError: none reads it.
    """
    specs = {(spec.name, _part_of(spec)): spec for _, spec in installed_modules("")}
    every = installed_families()
    found = [one for one in every if one.model_type == model_type] or _unlisted(model_type, specs.values())
    if not found:
        near = difflib.get_close_matches(model_type, [one.model_type for one in every], n=1)
        raise ConfigError(
            "model_type",
            expected="one that an installed plugin reads, or a published folder",
            got=repr(model_type),
            fix=f"Did you mean {near[0]!r}?" if near else "`mimo models` lists them.",
        )
    return tuple(_tried(one, specs[one.plugin, one.part]) for one in found)


def _unlisted(model_type: str, specs: Iterable[ModuleSpec]) -> list[ReadFamily]:
    """Return what reads a family that it doesn't list."""
    reading = [spec for spec in specs if spec.hf_any is not None and spec.hf_any.of(model_type) is not None]
    return [
        attrs.evolve(_family(model_type, spec, _part_of(spec), None, named=False), first=not place)
        for place, spec in enumerate(reading)
    ]


def try_folder(folder: Path) -> tuple[TriedFamily, ...]:
    """Return what plugins that read a published folder can do with each model in it, tried now, and what none reads.

    Raises:
        ConfigError: none reads it, or what its files say can't be done.
        CheckpointError: its ``config.json`` can't be read.
    """
    modules = installed_modules("")
    described = read_published_json(folder / CONFIG_NAME)
    parts = find_parts(folder, described, readers_of(modules), open_to=modules)
    left = unread_sections(described, parts)
    return (*map(_tried_part, parts), *(_unread(section, kind) for section, kind in left.items()))


def _unread(section: str, kind: str) -> TriedFamily:
    read = ReadFamily(model_type=kind or section, plugin="", part=section, first=False, named=False, axes=None)
    return TriedFamily(read=read, problem="nothing that is installed reads it in this folder")


def _families_of(spec: ModuleSpec) -> list[ReadFamily]:
    part, has, found = _part_of(spec), supported_axes(spec), []
    tested = _tested_of(spec)
    for family in spec.hf:
        without = set() if _has_experts(spec, family) else _EXPERT_AXES
        axes = tuple(axis for axis in has if axis not in without)
        found.append(_family(family.model_type, spec, part, axes, named=True))
    if spec.hf_any is not None:
        for model_type in spec.hf_any.known():
            axes_found = _recorded_axes(has, tested.get(model_type))
            found.append(_family(model_type, spec, part, axes_found, named=False))
    return [attrs.evolve(one, tested=tested.get(one.model_type)) for one in found]


def _tested_of(spec: ModuleSpec) -> Mapping[str, HfTested]:
    return {} if spec.hf_record is None else read_hf_tested(spec.hf_record, spec.name)


def _recorded_axes(has: Sequence[str], record: HfTested | None) -> tuple[str, ...] | None:
    if record is None:
        return None
    return () if record.problem else tuple(axis for axis in has if axis not in record.refused)


def _family(model_type: str, spec: ModuleSpec, part: str, axes: tuple[str, ...] | None, *, named: bool) -> ReadFamily:
    return ReadFamily(model_type=model_type, plugin=spec.name, part=part, first=False, named=named, axes=axes)


def _has_experts(spec: ModuleSpec, family: HfFamily) -> bool:
    if not isinstance(spec, LanguageModelSpec) or spec.experts is None:
        return False
    return spec.experts.count(_usual_config(spec, family)) > 0


def _usual_config(spec: ModuleSpec, family: HfFamily) -> Any:
    """Return the config of a ``config.json`` without keys; the plugin's own defaults where a family needs some."""
    try:
        given = dict(family.settings({}))
    except ConfigError:
        given = {}
    return structure(given, spec.config, f"config of {family.model_type}")


def _tried(read: ReadFamily, spec: ModuleSpec) -> TriedFamily:
    from mimo.model.testing import try_axes

    family = next((one for one in spec.hf if one.model_type == read.model_type), None)
    if family is None and spec.hf_any is not None:
        family = spec.hf_any.of(read.model_type)
    if family is None:
        return TriedFamily(read=read, problem="the installed library has no such model that this plugin could read")
    if family.whole is not None:
        return _recorded(read, spec)
    try:
        return TriedFamily(read=read, refused=try_axes(spec, _usual_config(spec, family)))
    except UserError as error:
        return TriedFamily(read=read, problem=f"expected {error.expected}, got {error.got}")


def _recorded(read: ReadFamily, spec: ModuleSpec) -> TriedFamily:
    """Return what is recorded of a whole model, whose type alone doesn't say what becomes of an item."""
    untried = f"its type alone doesn't say how an {read.part} is prepared: `mimo models DIR` tries a published folder"
    if read.tested is None:
        return TriedFamily(read=read, untried=untried, problem="nothing is recorded of it")
    refused = {axis: read.tested.refused.get(axis, "") for axis in supported_axes(spec)}
    return TriedFamily(read=read, untried=untried, problem=read.problem, refused={} if read.problem else refused)


def _tried_part(part: HfPart) -> TriedFamily:
    from mimo.model.testing import try_axes

    spec, family = part.reader.spec, part.reader.family
    read = _family(family.model_type, spec, _part_of(spec), None, named=family in spec.hf)
    read = attrs.evolve(read, first=True, tested=_tested_of(spec).get(family.model_type))
    try:
        width = {} if family.whole is None else {"hidden": family.whole.hidden(part.config)}
        return TriedFamily(read=read, refused=try_axes(spec, part.config, **width))
    except UserError as error:
        return TriedFamily(read=read, problem=f"expected {error.expected}, got {error.got}")


def _part_of(spec: ModuleSpec) -> str:
    if isinstance(spec, LanguageModelSpec):
        return LANGUAGE
    return spec.modality if isinstance(spec, EncoderSpec) else f"{spec.modality} {noun_of(spec)}"


def axes_in_words(axes: Iterable[str]) -> str:
    """Return axes as a table shows them: all have lanes."""
    held = set(axes)
    return " ".join(["dp", *(axis for axis in PARALLEL_AXES if axis in held)])
