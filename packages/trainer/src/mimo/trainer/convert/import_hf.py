"""Imports published Hugging Face folders into one checkpoint: compared with the settings, then streamed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.checkpoint import PublishedFolder, Stream, open_published, write_checkpoint
from mimo.hooks import CheckpointError, ConfigError, PluginError
from mimo.model import EncoderSpec, HfFamily, HfTensor, Stage, file_shapes, match_names
from mimo.model.runtime import create_on, left_over
from mimo.trainer.config.names import IMPORTED
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.convert.config_lines import line_of
from mimo.trainer.convert.published_parts import CONFIG_NAME, TIED, HfPart
from mimo.trainer.convert.streams import our_streams

_ANY_WIDTH = 1024
_SHOWN = 8


@attrs.frozen(kw_only=True)
class FolderRead:
    """A module that is ready to be read.

    Args:
        part: which.
        streams: its tensors by path.
        dtypes: that its tensors have in the folder.
        fresh: prefixes of paths that the folder has no tensors for.
        names: of the folder's tensors, those that are read or compared.
    """

    part: HfPart
    streams: Mapping[str, Stream]
    dtypes: tuple[str, ...]
    fresh: tuple[str, ...]
    names: frozenset[str]


def prepare(parts: Iterable[HfPart], asked: Mapping[str, Any]) -> tuple[FolderRead, ...]:
    """Compare folders with modules, by names, shapes and settings; no weight is read.

    Args:
        parts: that are to be imported.
        asked: configs of modules by name, where a file of settings says them; others are as their folder says.

    Raises:
        ConfigError: the settings of a module are not those of its folder; the message lists all differences.
        CheckpointError: a folder is damaged or incomplete, or its tensors are not those that its settings mean.
    """
    parts = tuple(parts)
    configs = {part.name: asked.get(part.name, part.config) for part in parts}
    hidden = _ANY_WIDTH  # of an encoder alone, what a folder holds doesn't depend on it
    for part in parts:
        if not isinstance(part.reader.spec, EncoderSpec):
            hidden = part.reader.spec.row_width(configs[part.name])
    compared = [_compare(part, configs[part.name], hidden) for part in parts]
    return tuple(_prepare(one, [other for other in compared if other is not one]) for one in compared)


def write(reads: Iterable[FolderRead], out: Path, *, config: Mapping[str, Any]) -> Path:
    """Stream modules into a new checkpoint of step 0, as fp32, and return its folder.

    Args:
        reads: of `prepare`.
        out: holds the step's folder.
        config: of the checkpoint.

    Raises:
        CheckpointError: a file is damaged, or ``out`` holds this step already.
    """
    reads = tuple(reads)
    return write_checkpoint(
        out,
        {f"{read.part.name}.{path}": stream for read in reads for path, stream in read.streams.items()},
        config=config,
        topology={read.part.name: {} for read in reads},
        common={f"{IMPORTED}.{read.part.name}": _about(read) for read in reads},
    )


def left_whole(paths: Collection[str], covered: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is not covered: first keys of which nothing is, and paths of which the first key is covered."""
    known = {path.partition(".")[0] for path in covered}
    whole = dict.fromkeys(path.partition(".")[0] for path in paths if path.partition(".")[0] not in known)
    return tuple(whole), tuple(path for path in paths if path.partition(".")[0] in known)


def whole_shapes(spec: Any, config: Any, hidden: int) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return a whole module, without storage where it can be built so, and the shapes of its parameters by path."""
    try:
        with create_on("meta"):
            built = _build(spec, config, hidden)
    except (RuntimeError, TypeError):  # some read values back while being built
        built = _build(spec, config, hidden)
    return built, {path: tuple(parameter.shape) for path, parameter in built.named_parameters()}


def _build(spec: Any, config: Any, hidden: int) -> nn.Module:
    built = spec.build(config, hidden) if isinstance(spec, EncoderSpec) else spec.build(config, Stage())
    assert isinstance(built, nn.Module)
    return built


@attrs.frozen(kw_only=True)
class _Compared:
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
    """

    part: HfPart
    folder: PublishedFolder
    built: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    renamed: Mapping[str, str]
    table: Sequence[HfTensor]
    expected: Mapping[str, tuple[int, ...]]
    differing: Sequence[ConfigError]


def _compare(part: HfPart, config: Any, hidden: int) -> _Compared:
    family, folder = part.reader.family, open_published(part.folder)
    _check_depth(part, config, folder)
    width = hidden if family.whole is None else family.whole.hidden(config)
    built, shapes = whole_shapes(part.reader.spec, config, width)
    renamed, table = match_names(family, family.tensors(config), folder.tensors)
    return _Compared(
        part=attrs.evolve(part, config=config),
        folder=folder,
        built=built,
        shapes=shapes,
        renamed=renamed,
        table=table,
        expected=file_shapes(table, shapes),
        differing=list(_settings_that_differ(part, config)),
    )


def _prepare(one: _Compared, others: Sequence[_Compared]) -> FolderRead:
    """Return a module that is ready to be read.

    Args:
        one: it.
        others: what is read besides.

    Raises:
        ConfigError: its settings are others than those of its folder.
        CheckpointError: a tensor of the folder is missing, has another shape, or is read by nothing.
    """
    part, folder, expected, config = one.part, one.folder, one.expected, one.part.config
    family = part.reader.family
    problems = list(_misfits(folder, expected))
    if one.differing:
        raise _refusal(part, one.differing, problems)
    beside = [other for other in others if other.part.folder == part.folder]
    known = frozenset(expected).union(*(other.expected for other in beside))
    copies = family.copies_there(config, one.renamed)
    for name in sorted(folder.tensors.keys() - known):
        if (first := copies.get(name)) is not None:
            problems += [] if _equal(folder, name, first) else [_untied(part, name, first)]
        elif _is_scope(one, beside, name) and (
            problem := left_over(family, config, name, partial(_whole, folder, name))
        ):
            problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError(
            str(part.folder),
            expected=f"the {len(expected)} tensors of a {family.model_type} model as its {CONFIG_NAME} describes it",
            got=f"{len(problems)} that do not fit:{''.join(f'{chr(10)}  {line}' for line in shorten(problems))}\n",
        )
    return FolderRead(
        part=part,
        streams=our_streams(
            one.table,
            one.shapes,
            folder,
            expected,
            dtype=torch.float32,
            where=lambda name: f"{folder.tensors[name].file}: {name}",
        ),
        dtypes=tuple(sorted({str(folder.tensors[name].dtype).removeprefix("torch.") for name in expected})),
        fresh=_fresh(part, one.built, one.table),
        names=frozenset(expected) | copies.keys() | _compared(family, config, folder),
    )


def _is_scope(one: _Compared, beside: Sequence[_Compared], name: str) -> bool:
    """Tell whether a tensor that nothing reads would have to be read by this module.

    Of a composed model's tensors a module reads those with its own prefix alone; what a whole one leaves, and a module
    beside it knows, is that one's.
    """
    if one.part.reader.family.whole is None:
        return name.startswith(tuple(one.renamed.values()) if one.part.section and one.renamed else ("",))
    return bool(beside) and not any(_knows(other, name) for other in beside)


def _knows(other: _Compared, name: str) -> bool:
    family, config = other.part.reader.family, other.part.config
    copies = family.copies_there(config, other.renamed)
    return name in copies or not left_over(family, config, name, partial(_whole, other.folder, name))


def _compared(family: HfFamily, config: Any, folder: PublishedFolder) -> frozenset[str]:
    """Return the names of tensors that are no parameters of ours and were compared with what they must hold."""
    patterns = family.fixed(config)
    return frozenset(name for name in folder.tensors if any(fnmatchcase(name, pattern) for pattern in patterns))


def _untied(part: HfPart, name: str, first: str) -> str:
    """Return what is wrong with a tensor that differs from the one with which ``config.json`` makes it one."""
    file = part.folder / CONFIG_NAME
    inside = part.described.get(part.section, {}) if part.section else part.described
    path = (part.section, TIED) if part.section and inside.get(TIED) else (TIED,)
    line = line_of(file.read_text(encoding="utf-8"), path) if file.is_file() else 0
    decides = f'line {line} of {CONFIG_NAME}, "{TIED}": true' if line else f"{CONFIG_NAME}, by {TIED}"
    return f"{name}: not equal to {first}, though {decides}, makes them one; where both count, it must say false"


def _check_depth(part: HfPart, config: Any, folder: PublishedFolder) -> None:
    """Refuse more layers than the folder has tensors, before a module of as many is built to be compared with it."""
    spec = part.reader.spec
    if isinstance(spec, EncoderSpec):
        layers = spec.stages.layers(config) if spec.stages else 0
    else:
        layers = spec.layers(config)
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


def _refusal(part: HfPart, differing: Sequence[ConfigError], problems: list[str]) -> ConfigError:
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


def _misfits(folder: PublishedFolder, expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        found = folder.tensors.get(name)
        if found is None:
            yield f"{name}: missing"
        elif found.shape != shape:
            yield f"{name}: shape {list(found.shape)} there, {list(shape)} here"
        elif not found.dtype.is_floating_point:
            yield f"{name}: of the type {str(found.dtype).removeprefix('torch.')}, which is no floating one"


def _equal(folder: PublishedFolder, name: str, first: str) -> bool:
    one, other = folder.tensors[name], folder.tensors.get(first)
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    chunks = (folder.elements(each, 0, one.numbers) for each in (name, first))
    return all(torch.equal(*pair) for pair in zip(*chunks, strict=True))


def _whole(folder: PublishedFolder, name: str) -> Tensor:
    return torch.cat([chunk.clone() for chunk in folder.elements(name, 0, folder.tensors[name].numbers)])


def _fresh(part: HfPart, built: nn.Module, table: Iterable[HfTensor]) -> tuple[str, ...]:
    """Return what of the module the folder lacks: whole parts, or the table is wrong."""
    covered = {entry.ours for entry in table}
    names = dict.fromkeys([*(path for path, _ in built.named_parameters()), *built.state_dict()])
    whole, torn = left_whole([name for name in names if name not in covered], covered)
    if torn:
        raise PluginError(
            f"modules.{part.name}.plugin",
            expected=f"a table of {part.reader.family.model_type} that fills each part of {part.reader.spec.name!r} "
            "wholly, or not at all",
            got=f"nothing for {', '.join(shorten(list(torn)))}",
        )
    return whole


def _about(read: FolderRead) -> Mapping[str, Any]:
    return {
        "folder": str(read.part.folder.absolute()),
        "model_type": read.part.reader.family.model_type,
        "dtypes": list(read.dtypes),
        "fresh": list(read.fresh),
        "ignored": dict(read.part.ignored),
        "carried": dict(read.part.carried),
    }


def shorten(lines: list[str]) -> list[str]:
    """Return the first few of some lines, and how many more there are."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]
