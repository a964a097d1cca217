"""The modules in published Hugging Face folders that installed plugins can read, by ``config.json``. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.model import EncoderSpec, ModuleSpec
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.published.part import CONFIG_NAME, HfPart, keys_of, read_part
from mimo.trainer.published.readers import Reader

_VISION = "vision"
"""Name of the module that reads all of a published model but its language model."""
_OF_MODELS = frozenset({"text_config", "llm_config", "vision_config", "audio_config", "speech_config", "video_config"})
"""Sections that describe a model also where they don't say of which family."""


def find_parts(
    folder: Path,
    described: Mapping[str, Any],
    readers: Sequence[Reader],
    *,
    open_to: Sequence[tuple[str, ModuleSpec]] = (),
    in_sections: bool = False,
    plugins: Collection[str] = (),
    wanted: Collection[str] = (),
    ignore: Callable[[str], Collection[str]] = lambda _module: (),
) -> tuple[HfPart, ...]:
    """Return the modules that a folder holds.

    Args:
        folder: of the files.
        described: its ``config.json``.
        readers: that may read it.
        open_to: modules whose plugins may read more than the families that they name; what a reader names is read by
            that.
        in_sections: whether these may read a part of a composed model too, of which nobody says how it is composed.
        plugins: names of those that may in any case.
        wanted: names of modules that are to be read, none for all; others are left out where they can't be read.
        ignore: of a module, the keys of ``config.json`` that are set aside, as far as its family can.

    Raises:
        ConfigError: there is nothing that a reader could read, or a module could be several things; or a setting of the
            folder is one that ours can't do.
    """
    where = str(folder / CONFIG_NAME)
    sections = dict(_sections(described))
    if any(one.get("quantization_config") is not None for one in [described, *(one for _, one in sections.values())]):
        raise ConfigError(
            where, expected="weights in a floating type", got="a quantization_config", fix="Fetch the full weights."
        )
    kinds = {section: kind for section, (kind, _) in sections.items()}
    found = None if in_sections else _find_whole(kinds, readers, open_to)
    if found is None:
        found = _matching(kinds, readers)
        named = {section for several in found.values() for section, _ in several}
        left = {section: kind for section, kind in kinds.items() if section not in named}
        for name, spec in open_to:
            inside = in_sections or spec.name in plugins
            if name not in found:
                own = {section: kind for section, kind in left.items() if inside or not section}
                found |= _matching_open(own, [(name, spec)])
    if not found:
        known = sorted({f"{reader.family.model_type} ({reader.spec.name})" for reader in readers})
        raise ConfigError(
            f"{where} model_type",
            expected=f"a family that can be read here: {', '.join(known) or 'there is none'}",
            got=", ".join(repr(kind) + (f" in {section}" if section else "") for section, (kind, _) in sections.items())
            or "none",
            fix="`mimo plugins` lists what is installed.",
        )
    for module, several in found.items():
        several[:] = [
            one for one in several if one[0]
        ] or several  # a section says more closely what it is than the whole
        if len(several) > 1:
            plugins = ", ".join(f"{reader.spec.name} of {section or 'all of it'}" for section, reader in several)
            raise ConfigError(
                where,
                expected=f"one thing that can be modules.{module}",
                got=plugins,
                fix="Give --config FILE, which names the module's plugin.",
            )
    first = {module: one for module, (one, *_) in found.items()}
    parts = tuple(_read(folder, described, first, wanted=wanted, ignore=ignore))
    return tuple(_in_whole(part, parts) for part in parts)


def _read(
    folder: Path,
    described: Mapping[str, Any],
    found: Mapping[str, tuple[str, Reader]],
    *,
    wanted: Collection[str],
    ignore: Callable[[str], Collection[str]],
) -> Iterator[HfPart]:
    """Yield the modules of a folder, of each its section and what reads it; see `find_parts`."""
    whole = next((reader.family.whole for _, reader in found.values() if reader.family.whole), None)
    for module, (section, reader) in found.items():
        said = keys_of(described, section, whole if module == LANGUAGE else None)
        try:
            yield read_part(folder, described, section, reader, said=said, ignore=ignore(module))
        except ConfigError as error:
            others = [other for other in found if other != module]
            if module in wanted or not others:
                raise
            if not wanted:
                fix = f"{error.fix} `--part {others[0]}` reads that alone.".strip()
                raise ConfigError(error.where, expected=error.expected, got=error.got, fix=fix) from error


def unread_sections(described: Mapping[str, Any], parts: Iterable[HfPart]) -> dict[str, str]:
    """Return the sections of a ``config.json`` that describe a model of which no part is, each with its family."""
    parts = tuple(parts)
    read = {part.section for part in parts}
    for part in parts:
        if part.reader.family.whole is not None:
            read |= described.keys() - {part.reader.family.whole.section}
    found = {}
    for section, one in described.items():
        kind = one.get("model_type", "") if isinstance(one, Mapping) else ""
        is_model = isinstance(one, Mapping) and (section in _OF_MODELS or (kind and isinstance(kind, str)))
        if is_model and section not in read:
            found[section] = str(kind)
    return found


def _in_whole(part: HfPart, parts: Iterable[HfPart]) -> HfPart:
    """Return a part, a language model with the settings that it must have in a whole model."""
    needed: dict[str, Any] = {}
    for other in parts:
        if part.name == LANGUAGE and other.reader.family.whole is not None:
            needed |= other.reader.family.whole.settings(other.config)
    spec = part.reader.spec
    for key, value in needed.items():
        if key not in attrs.fields_dict(spec.config):
            raise ConfigError(
                f"modules.{LANGUAGE}.plugin",
                expected=f"one with {key} = {value!r}, as in the model of {part.folder / CONFIG_NAME}",
                got=repr(spec.name),
                fix="Name another plugin that reads the family: --plugin hf-decoder.",
            )
    given = {**part.given, **needed}
    return attrs.evolve(part, given=given, config=attrs.evolve(part.config, **needed))


def _find_whole(
    kinds: Mapping[str, str], readers: Iterable[Reader], open_to: Iterable[tuple[str, ModuleSpec]]
) -> dict[str, list[tuple[str, Reader]]] | None:
    """Return the two modules of a folder of a whole model, by an encoder that reads all but the language model.

    None if the folder is none, or no plugin reads it so.
    """
    encoders = [(name, spec) for name, spec in open_to if isinstance(spec, EncoderSpec)]
    whole = _matching_open({"": kinds.get("", "")}, encoders)
    found: dict[str, list[tuple[str, Reader]]] = {}
    for several in whole.values():
        for section, reader in several:
            if reader.family.whole is not None:
                name = _VISION if reader.module == reader.spec.name else reader.module
                found.setdefault(name, []).append((section, attrs.evolve(reader, module=name)))
    if not found:
        return None
    ((_, first), *_), *_ = found.values()
    assert first.family.whole is not None
    inside = {section: kind for section, kind in kinds.items() if section in {"", first.family.whole.section}}
    text = _matching(inside, [reader for reader in readers if reader.module == LANGUAGE])
    languages = [(name, spec) for name, spec in open_to if name == LANGUAGE and name not in text]
    return found | text | _matching_open({key: one for key, one in inside.items() if key}, languages)


def _matching(kinds: Mapping[str, str], readers: Iterable[Reader]) -> dict[str, list[tuple[str, Reader]]]:
    """Return for each module the sections of a folder that it could be, and what reads them."""
    found: dict[str, list[tuple[str, Reader]]] = {}
    for section, kind in kinds.items():
        for reader in readers:
            if reader.family.model_type == kind:
                found.setdefault(reader.module, []).append((section, reader))
    return found


def _matching_open(
    kinds: Mapping[str, str], modules: Iterable[tuple[str, ModuleSpec]]
) -> dict[str, list[tuple[str, Reader]]]:
    """Return the same of plugins that may read more than they name."""
    found: dict[str, list[tuple[str, Reader]]] = {}
    for name, spec in modules:
        for section, kind in kinds.items():
            if spec.hf_any is not None and (family := spec.hf_any.of(kind)) is not None:
                found.setdefault(name, []).append((section, Reader(module=name, spec=spec, family=family)))
    return found


def _sections(described: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """Yield all of a ``config.json``, and its sections that have a ``model_type`` of their own.

    One that is called as the whole is but a part of it: so does Qwen2-VL's vision in folders of transformers 4.
    """
    for section, one in [("", described), *described.items()]:
        kind = one.get("model_type") if isinstance(one, Mapping) else None
        if isinstance(kind, str) and not (section and kind == described.get("model_type")):
            yield section, (kind, one)
