"""A module of a checkpoint as a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.checkpoint import Stream, read_manifest, write_safetensors
from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HfFamily, HfTensor, HfWhole, file_shapes, hf_families, match_names, without_absent
from mimo.trainer.config.plugin_kinds import Find, find_installed
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.exporting.adapter import write_adapter
from mimo.trainer.exporting.merge import Merged, open_merged
from mimo.trainer.exporting.saved_module import as_imported, family_of, imported_from, saved_module
from mimo.trainer.published.covered import left_whole
from mimo.trainer.published.part import CONFIG_NAME, TIED
from mimo.trainer.published.streams import constant_streams, their_streams

_BESIDE = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Small files of a published folder that go with weights of any training."""


@attrs.frozen(kw_only=True)
class Exported:
    """What was written.

    Args:
        folder: where.
        family: as which.
        tensors: how many.
        copied: names of the files that were copied beside.
        left: parts of the module that the family has no place for.
    """

    folder: Path
    family: HfFamily
    tensors: int
    copied: tuple[str, ...]
    left: tuple[str, ...]


def whole_or_language(checkpoint: Path, find: Find = find_installed) -> str:
    """Return the name of the encoder that a published model was read by whole, the language model's if there is none.

    Args:
        checkpoint: a step's folder.
        find: where plugins come from.
    """
    manifest = read_manifest(checkpoint)
    tables = manifest.config.get("modules", {})
    for name in manifest.topology:
        if name in tables and _reads_for_language(name, tables[name]):
            spec, config = saved_module(checkpoint, manifest, name, find)
            if LANGUAGE in manifest.topology and any(family.whole for family in hf_families(spec, config)):
                return name
    return LANGUAGE


def _reads_for_language(name: str, table: Mapping[str, Any]) -> bool:
    """Tell whether a module's table is that of an encoder of the language model."""
    is_other = name == LANGUAGE or table.get("distil") or table.get("fed_by")
    feeds = table.get("feeds", LANGUAGE)
    return not is_other and LANGUAGE in ([feeds] if isinstance(feeds, str) else feeds)


def export(
    checkpoint: Path,
    out: Path,
    *,
    module: str,
    dtype: torch.dtype,
    shard_bytes: int,
    beside: Path | None = None,
    model_type: str = "",
    adapter: bool = False,
    find: Find = find_installed,
) -> Exported:
    """Write a module's weights in a family's form, LoRA added to them; a few MiB are held at a time.

    With a module whose family holds a language model too, that of the checkpoint goes into the same folder.

    Args:
        checkpoint: a step's folder, saved in any layout.
        out: the new folder.
        module: which.
        dtype: of the weights.
        shard_bytes: of a file.
        beside: a folder to copy tokenizer files and the like from; None for the one that the module was imported from,
            if it is still there.
        model_type: of the family to write; empty for the one that the module was imported from, or else the first that
            has a place for all of its settings.
        adapter: write instead what LoRA has learned, by itself.
        find: where plugins come from.

    Raises:
        ConfigError: no family can say what the module's settings are, or has the linears that are adapted.
        CheckpointError: the checkpoint lacks the module or something of it, or is damaged.
    """
    with open_merged(checkpoint) as merged:
        spec, config = saved_module(checkpoint, merged.manifest, module, find)
        imported = imported_from(merged.manifest, module)
        family, described = family_of(spec, config, module, asked=model_type, known=imported.get("model_type", ""))
        renamed, table = match_names(family, family.tensors(config), ())
        if adapter:
            count = write_adapter(
                merged,
                out,
                module=module,
                spec=spec,
                table=without_absent(table, lambda _entry: False),
                linears=table if family.adaptable is None else family.adaptable(config),
                dtype=dtype,
            )
            return Exported(folder=out, family=family, tensors=2 * count, copied=(), left=())
        constants = family.constants_there(config, renamed)
        found = _place(checkpoint, merged, module, family, table, dtype, constants)
        about = {
            **_about(family, config, found.table),
            **described,
            **as_imported(imported, family),
            "dtype": str(dtype).removeprefix("torch."),
        }
        streams, left = found.streams, found.left
        if family.whole is not None:
            other, section = _language_of(checkpoint, merged, family.whole, config, about, dtype, find)
            streams, left = {**streams, **other.streams}, (*left, *other.left)
            about[family.whole.section] = section
            about |= {TIED: section[TIED]} if TIED in section else {}
        files = _files_of(beside or (Path(imported["folder"]) if imported else None))
        write_safetensors(
            out,
            streams,
            texts={CONFIG_NAME: json.dumps(about, indent=2, sort_keys=True, allow_nan=False) + "\n"},
            copied=files,
            shard_bytes=shard_bytes,
        )
    return Exported(
        folder=out, family=family, tensors=len(streams), copied=tuple(file.name for file in files), left=left
    )


@attrs.frozen(kw_only=True)
class _Placed:
    """A module's tensors as a folder has them.

    Args:
        table: of those that are there.
        streams: by their names.
        left: parts of the module that the family has no place for.
    """

    table: Sequence[HfTensor]
    streams: Mapping[str, Stream]
    left: tuple[str, ...]


def _place(
    checkpoint: Path,
    merged: Merged,
    module: str,
    family: HfFamily,
    table: Sequence[HfTensor],
    dtype: torch.dtype,
    constants: Mapping[str, Tensor],
) -> _Placed:
    held = {
        name.removeprefix(f"{module}."): entry.shape
        for name, entry in merged.tensors.items()
        if name.startswith(f"{module}.")
    }
    table = without_absent(table, lambda entry: entry.ours in held)
    left = _left(checkpoint, held, [entry.ours for entry in table], family, module)
    streams = their_streams(table, held, merged, file_shapes(table, held), before=f"{module}.", dtype=dtype)
    return _Placed(table=table, streams=streams | constant_streams(constants), left=left)


def _about(family: HfFamily, config: Any, table: Sequence[HfTensor]) -> dict[str, Any]:
    """Return what ``config.json`` says of a family, and of the tensors that are optional."""
    said = {"architectures": [family.architecture], "model_type": family.model_type}
    return {**said, **(family.beside(config) if any(entry.optional for entry in table) else {})}


def _language_of(
    checkpoint: Path,
    merged: Merged,
    whole: HfWhole,
    config: Any,
    about: Mapping[str, Any],
    dtype: torch.dtype,
    find: Find,
) -> tuple[_Placed, Mapping[str, Any]]:
    """Return the language model with the names that it has in a folder of a whole model, and its section there.

    Raises:
        ConfigError: it isn't of the family that the whole model has, or its tensors have other names.
    """
    spec, own = saved_module(checkpoint, merged.manifest, LANGUAGE, find)
    kind = about[whole.section]["model_type"]
    family, described = family_of(spec, own, LANGUAGE, asked=kind, known=kind)
    names = whole.names(config)
    for renamed in family.renamed:
        _, table = match_names(attrs.evolve(family, renamed=(renamed,)), family.tensors(own), ())
        if {_general(name) for entry in table for name in entry.names} <= names:
            constants = family.constants_there(own, renamed)
            found = _place(checkpoint, merged, LANGUAGE, family, table, dtype, constants)
            imported = imported_from(merged.manifest, LANGUAGE)
            return found, {**described, **as_imported(imported, family), "model_type": family.model_type}
    raise ConfigError(
        f"modules.{LANGUAGE}.plugin",
        expected=f"one that writes {kind} as {about['architectures'][0]} holds it",
        got=repr(spec.name),
        fix="Export the modules one by one: --module.",
    )


def _general(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _left(
    checkpoint: Path, held: Mapping[str, Any], named: Sequence[str], family: HfFamily, module: str
) -> tuple[str, ...]:
    """Return the parts that the table has no place for, after all that it has were found."""
    missing = [path for path in named if path not in held]
    left, torn = left_whole([path for path in held if path not in set(named)], named)
    if missing or torn:
        lines = [f"{module}.{path}: missing" for path in missing]
        lines += [f"{module}.{path}: {family.model_type} has no place for it" for path in torn]
        raise CheckpointError(
            str(checkpoint),
            expected=f"a module {module} that is a {family.model_type} model",
            got=f"{len(lines)} tensors that do not fit:{''.join(f'{chr(10)}  {line}' for line in lines[:8])}\n",
        )
    return left


def _files_of(folder: Path | None) -> list[Path]:
    """Return the small files of a published folder, none of one that isn't there."""
    if folder is None or not folder.is_dir():
        return []
    return [folder / name for name in _BESIDE if (folder / name).is_file()]
