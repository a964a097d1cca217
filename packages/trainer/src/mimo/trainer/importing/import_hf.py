"""Imports published Hugging Face folders into one checkpoint: compared with the settings, then streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.checkpoint import PublishedFolder, Stream, write_checkpoint
from mimo.hooks import CheckpointError, PluginError
from mimo.model import GeneratorSpec, HfFamily, HfTensor, LanguageModelSpec
from mimo.model.runtime import left_over
from mimo.trainer.config.names import IMPORTED
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.importing.compare import Compared, compare, misfits, settings_refusal, shorten
from mimo.trainer.importing.config_lines import line_of
from mimo.trainer.published.covered import left_whole
from mimo.trainer.published.part import CONFIG_NAME, TIED, HfPart
from mimo.trainer.published.streams import our_streams


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


def prepare(
    parts: Iterable[HfPart], asked: Mapping[str, Any], widths: Mapping[str, int] | None = None
) -> tuple[FolderRead, ...]:
    """Compare folders with modules, by names, shapes and settings; no weight is read.

    Args:
        parts: that are to be imported.
        asked: configs of modules by name, where a file of settings says them; others are as their folder says.
        widths: of the rows that modules beside the language model are built for, by name, where settings say so.

    Raises:
        ConfigError: the settings of a module are not those of its folder; the message lists all differences.
        CheckpointError: a folder is damaged or incomplete, or its tensors are not those that its settings mean.
    """
    parts = tuple(parts)
    configs = {part.name: asked.get(part.name, part.config) for part in parts}
    found = _widths(parts, configs) if widths is None else widths
    compared = [compare(part, configs[part.name], found.get(part.name)) for part in parts]
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


def _widths(parts: Sequence[HfPart], configs: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the width of the rows that modules are built for, by name; of none without the language model."""
    for language in parts:
        spec = language.reader.spec
        if language.name == LANGUAGE and isinstance(spec, LanguageModelSpec):
            taken, made = spec.row_width(configs[LANGUAGE]), spec.hidden(configs[LANGUAGE])
            return {part.name: made if isinstance(part.reader.spec, GeneratorSpec) else taken for part in parts}
    return {}


def _prepare(one: Compared, others: Sequence[Compared]) -> FolderRead:
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
    problems = list(misfits(folder, expected))
    if one.differing:
        raise settings_refusal(part, one.differing, problems)
    beside = [other for other in others if other.part.folder == part.folder]
    known = frozenset(expected).union(*(other.expected for other in beside))
    copies = family.copies_there(config, one.renamed)
    for name in sorted(folder.tensors.keys() - known):
        if (first := copies.get(name)) is not None:
            problems += [] if _equal(folder, name, first) else [_untied(part, name, first)]
        elif _is_scope(one, beside, name) and (
            problem := left_over(family, config, name, partial(_whole, folder, name), one.constants)
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
        names=frozenset(expected) | copies.keys() | _fixed_names(family, config, folder) | one.constants.keys(),
    )


def _is_scope(one: Compared, beside: Sequence[Compared], name: str) -> bool:
    """Tell whether a tensor that nothing reads would have to be read by this module.

    Of a composed model's tensors a module reads those with its own prefix alone; what a whole one leaves, and a module
    beside it knows, is that one's.
    """
    if one.part.reader.family.whole is None:
        return name.startswith(tuple(one.renamed.values()) if one.part.section and one.renamed else ("",))
    return bool(beside) and not any(_knows(other, name) for other in beside)


def _knows(other: Compared, name: str) -> bool:
    family, config = other.part.reader.family, other.part.config
    copies = family.copies_there(config, other.renamed)
    return name in copies or not left_over(family, config, name, partial(_whole, other.folder, name), other.constants)


def _fixed_names(family: HfFamily, config: Any, folder: PublishedFolder) -> frozenset[str]:
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
