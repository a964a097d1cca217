"""A module beside the published folder that it is to be read from: tensors by name and shape, and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from mimo.checkpoint import PublishedFolder, open_published
from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HfTensor, LanguageModelSpec, ModuleSpec, Stage, file_shapes, match_names
from mimo.model.runtime import stage_without_storage
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.published.part import CONFIG_NAME, HfPart

_SHOWN = 8
_ANY_WIDTH = 1024
"""Of the rows that a module is built for where nothing says how wide they are."""


@attrs.frozen(kw_only=True)
class Compared:
    """A module beside its folder.

    Args:
        part: which, with the config that is asked for.
        folder: its.
        built: the module, without storage.
        shapes: of its parameters by path.
        renamed: prefixes of the folder's names, see `match_names`.
        table: with these names.
        expected: shapes of the tensors that the folder must hold, by name.
        differing: settings that aren't the folder's.
        constants: whole numbers that the folder must hold where it has them, by name.
    """

    part: HfPart
    folder: PublishedFolder
    built: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    renamed: Mapping[str, str]
    table: Sequence[HfTensor]
    expected: Mapping[str, tuple[int, ...]]
    differing: Sequence[ConfigError]
    constants: Mapping[str, Tensor]


def compare(part: HfPart, config: Any, hidden: int | None) -> Compared:
    """Return a module of these settings beside its folder.

    Args:
        part: which.
        config: that is asked for.
        hidden: width of the language model's rows, for a module whose family doesn't say it; None for that of which the
            folder is, if any of its tensors depends on it.

    Raises:
        CheckpointError: the folder can't be read, or has fewer tensors than the settings have layers.
    """
    family, folder = part.reader.family, open_published(part.folder)
    _check_depth(part, config, folder)
    renamed, table = match_names(family, family.tensors(config), folder.tensors)
    width = hidden if family.whole is None else family.whole.hidden(config)
    built, shapes = _whole(part.reader.spec, config, width or _ANY_WIDTH)
    if width is None and (there := _width_there(part.reader.spec, config, folder, table, shapes)):
        built, shapes = _whole(part.reader.spec, config, there)
    return Compared(
        part=attrs.evolve(part, config=config),
        folder=folder,
        built=built,
        shapes=shapes,
        renamed=renamed,
        table=table,
        expected=file_shapes(table, shapes),
        differing=list(_settings_that_differ(part, config)),
        constants=family.constants_there(config, renamed),
    )


def settings_refusal(part: HfPart, differing: Sequence[ConfigError], problems: list[str]) -> ConfigError:
    """Return the error of settings that differ, in a line where that is all."""
    fix = f"`mimo checkpoint import-hf {part.folder}` prints the settings that go with it."
    if len(differing) == 1 and not problems:
        (one,) = differing
        return ConfigError(one.where, expected=one.expected, got=one.got, fix=fix)
    lines = [*map(str, differing), *shorten(problems)]
    return ConfigError(
        f"modules.{part.name}.config",
        expected=f"what {part.folder / CONFIG_NAME} says",
        got=f"others:{''.join(f'{chr(10)}  {line}' for line in lines)}\n",
        fix=fix,
    )


def misfits(folder: PublishedFolder, expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a line about each tensor that a folder lacks, or has with another shape or type than is expected."""
    for name, shape in expected.items():
        found = folder.tensors.get(name)
        if found is None:
            yield f"{name}: missing"
        elif found.shape != shape:
            yield f"{name}: shape {list(found.shape)} there, {list(shape)} here"
        elif not found.dtype.is_floating_point:
            yield f"{name}: of the type {str(found.dtype).removeprefix('torch.')}, which is no floating one"


def shorten(lines: list[str]) -> list[str]:
    """Return the first few of some lines, and how many more there are."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _whole(spec: ModuleSpec, config: Any, hidden: int) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return a whole module, without storage where it can be built so, and the shapes of its parameters by path."""
    built = stage_without_storage(spec, config, Stage(), hidden)
    return built, {path: tuple(parameter.shape) for path, parameter in built.named_parameters()}


def _width_there(
    spec: ModuleSpec,
    config: Any,
    folder: PublishedFolder,
    table: Sequence[HfTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> int:
    """Return for rows of which width a folder's tensors are; 0 where none depends on it, or it is what was tried.

    Args:
        spec: the plugin.
        config: that is asked for.
        folder: the folder.
        table: with its names.
        shapes: of the parameters of a module that was built for rows of `_ANY_WIDTH`, by path.
    """
    tried = {name: shape for name, shape in file_shapes(table, shapes).items() if name in folder.tensors}
    if all(shape == folder.tensors[name].shape for name, shape in tried.items()):
        return 0
    wider = file_shapes(table, _whole(spec, config, 2 * _ANY_WIDTH)[1])
    for name, shape in tried.items():
        for *sizes, size in zip(shape, wider[name], folder.tensors[name].shape, strict=False):
            if sizes == [_ANY_WIDTH, 2 * _ANY_WIDTH]:
                return size
    return 0


def _check_depth(part: HfPart, config: Any, folder: PublishedFolder) -> None:
    """Refuse more layers than the folder has tensors, before a module of as many is built to be compared with it."""
    spec = part.reader.spec
    if isinstance(spec, LanguageModelSpec):
        layers = spec.layers(config)
    else:
        layers = spec.stages.layers(config) if spec.stages else 0
    if layers > len(folder.tensors):
        raise CheckpointError(
            str(part.folder), expected=f"tensors of {layers} layers", got=f"{len(folder.tensors)} tensors in all"
        )


def _settings_that_differ(part: HfPart, config: Any) -> Iterator[ConfigError]:
    """Yield the settings in which a config is not the folder's, as far as the family distinguishes them."""
    if config == part.config:
        return
    where = f"modules.{part.name}.config"
    try:
        there = _said(part, part.config)
    except ConfigError:  # a family that is read and never written
        there, here = unstructure(part.config), unstructure(config)
    else:
        try:
            here = _said(part, config)
        except ConfigError as error:
            yield ConfigError(error.where, expected=error.expected, got=error.got)
            return
    for key, value in there.items():
        if here[key] != value:
            expected = f"{value!r}, as {part.folder / CONFIG_NAME} says"
            yield ConfigError(f"{where}.{key}", expected=expected, got=repr(here[key]))


def _said(part: HfPart, config: Any) -> Mapping[str, Any]:
    """Return the settings that a folder of ``config`` would mean, with nothing left to follow from something else."""
    family = part.reader.family
    given = family.settings(family.describe(config))
    found: Mapping[str, Any] = unstructure(structure(given, part.reader.spec.config, f"modules.{part.name}.config"))
    return found
