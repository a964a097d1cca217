"""The modules in published Hugging Face folders that installed plugins can read, by ``config.json``. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from mimo.checkpoint import read_published_json
from mimo.hooks import ConfigError, discover
from mimo.model import ENCODERS, LANGUAGE_MODELS, EncoderSpec, HfFamily, HfWhole, LanguageModelSpec
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.config.structure import structure, unstructure

CONFIG_NAME = "config.json"
_VISION = "vision"
"""Name of the module that reads all of a published model but its language model."""
TIED = "tie_word_embeddings"
_OF_MODELS = frozenset({"text_config", "llm_config", "vision_config", "audio_config", "speech_config", "video_config"})
"""Sections that describe a model also where they don't say of which family."""

Spec: TypeAlias = EncoderSpec | LanguageModelSpec


@attrs.frozen(kw_only=True)
class Reader:
    """A plugin that can read a family, and the module for which it does."""

    module: str
    spec: Spec
    family: HfFamily


@attrs.frozen(kw_only=True)
class HfPart:
    """A module that a published folder holds.

    Args:
        folder: that holds it.
        section: of ``config.json`` that describes it, empty for all of it.
        reader: what reads it.
        config: the plugin's, as the folder says.
        given: the settings that the folder decides.
        described: all of its ``config.json``.
        ignored: keys of that which were set aside, with their values.
        carried: keys of its section that an export writes again, with their values.
    """

    folder: Path
    section: str
    reader: Reader
    config: Any
    given: Mapping[str, Any]
    described: Mapping[str, Any] = attrs.field(factory=dict)
    ignored: Mapping[str, Any] = attrs.field(factory=dict)
    carried: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """The module's."""
        return self.reader.module

    @property
    def table(self) -> Mapping[str, Any]:
        """The module's settings as a file has them."""
        plain = unstructure(self.config)
        ignored = {"ignore": list(self.ignored)} if self.ignored else {}
        return {"plugin": self.reader.spec.name, **ignored, "config": {key: plain[key] for key in self.given}}


def split_word(word: str) -> tuple[str, Path]:
    """Return of ``module=folder`` both, and of a folder alone an empty name and the folder."""
    name, equals, folder = word.partition("=")
    return (name, Path(folder)) if equals and not Path(word).exists() else ("", Path(word))


def readers_of(modules: Iterable[tuple[str, Spec]]) -> tuple[Reader, ...]:
    """Return all that the plugins of these modules can read."""
    return tuple(Reader(module=name, spec=spec, family=family) for name, spec in modules for family in spec.hf)


def installed_readers(name: str) -> tuple[Reader, ...]:
    """Return the families that installed plugins name, for the module ``name``; see `installed_modules`."""
    return readers_of(installed_modules(name))


def installed_modules(name: str, plugins: Collection[str] = ()) -> list[tuple[str, Spec]]:
    """Return what installed plugins can be the module ``name``; without a name, encoders have their plugin's.

    Only the language model has a name that is fixed.

    Args:
        name: of the module.
        plugins: names of those that are wanted; of encoders, or of language models, of which none is named, all are.

    Raises:
        ConfigError: one of this name isn't installed, or can't be this module.
    """
    encoders, languages = discover(ENCODERS), discover(LANGUAGE_MODELS)
    kinds: list[tuple[str | None, Mapping[str, Spec]]] = []
    kinds += [(LANGUAGE, languages)] if name in {"", LANGUAGE} else []
    kinds += [(name or None, encoders)] if name != LANGUAGE else []
    for plugin in plugins:
        if not any(plugin in specs for _, specs in kinds):
            known = ", ".join(spec for _, specs in kinds for spec in specs)
            raise ConfigError("--plugin", expected=f"one of {known}", got=repr(plugin))
    found: list[tuple[str, Spec]] = []
    for module, specs in kinds:
        wanted = [spec for plugin, spec in specs.items() if plugin in plugins] or list(specs.values())
        found += [(module or spec.name, spec) for spec in wanted]
    return found


def find_parts(
    folder: Path,
    described: Mapping[str, Any],
    readers: Sequence[Reader],
    *,
    open_to: Sequence[tuple[str, Spec]] = (),
    in_sections: bool = False,
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
        open_kinds = {
            section: kind for section, kind in kinds.items() if section not in named and (in_sections or not section)
        }
        found |= _matching_open(open_kinds, [(name, spec) for name, spec in open_to if name not in found])
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
    whole = next((reader.family.whole for ((_, reader), *_) in found.values() if reader.family.whole), None)
    parts = []
    for module, ((section, reader), *_) in found.items():
        said = _keys(described, section, whole if module == LANGUAGE else None)
        parts.append(_part(folder, described, section, reader, said=said, ignore=ignore(module)))
    return tuple(_in_whole(part, parts) for part in parts)


def read_again(part: HfPart, folder: Path, *, whole: HfWhole, decided: Collection[str]) -> HfPart:
    """Return a module of a whole model as another folder of the same family holds it.

    Args:
        part: the module.
        folder: the other one, as the library writes it.
        whole: what the encoder's family says of the language model.
        decided: settings of the language model that its own section doesn't say, which stay as they are.

    Raises:
        ConfigError: as `find_parts`.
    """
    described = read_published_json(folder / CONFIG_NAME)
    if part.name != LANGUAGE:
        return _part(folder, described, "", part.reader, said=described, ignore=part.ignored)
    said = _keys(described, whole.section, whole)
    found = _part(folder, described, whole.section, part.reader, said=said, ignore=part.ignored)
    kept = {key: getattr(part.config, key) for key in decided if key in part.given}
    return attrs.evolve(found, config=attrs.evolve(found.config, **kept))


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
    kinds: Mapping[str, str], readers: Iterable[Reader], open_to: Iterable[tuple[str, Spec]]
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
    kinds: Mapping[str, str], modules: Iterable[tuple[str, Spec]]
) -> dict[str, list[tuple[str, Reader]]]:
    """Return the same of plugins that may read more than they name."""
    found: dict[str, list[tuple[str, Reader]]] = {}
    for name, spec in modules:
        for section, kind in kinds.items():
            if spec.hf_any is not None and (family := spec.hf_any.of(kind)) is not None:
                found.setdefault(name, []).append((section, Reader(module=name, spec=spec, family=family)))
    return found


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


def _part(
    folder: Path,
    described: Mapping[str, Any],
    section: str,
    reader: Reader,
    *,
    said: Mapping[str, Any],
    ignore: Collection[str],
) -> HfPart:
    where = folder / CONFIG_NAME
    ignored = {key: said[key] for key in reader.family.dropout if key in ignore and said.get(key)}
    try:
        files = {name: read_published_json(folder / name) for name in reader.family.files if (folder / name).is_file()}
        given = dict(reader.family.settings({**said, **dict.fromkeys(ignored, 0.0), **files}))
        config: Any = structure(given, reader.spec.config, f"modules.{reader.module}.config")
    except ConfigError as error:
        of_a_file = error.where.startswith((CONFIG_NAME, *reader.family.files))
        raise ConfigError(
            f"{folder}/{error.where}" if of_a_file else f"{where}: {error.where}",
            expected=error.expected,
            got=error.got,
            fix=error.fix,
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            str(where),
            expected=f"the settings of a {reader.family.model_type} model",
            got=f"others ({type(error).__name__}: {error})",
        ) from error
    return HfPart(
        folder=folder,
        section=section,
        reader=reader,
        config=config,
        given=given,
        described=described,
        ignored=ignored,
        carried=carried(reader.family, said),
    )


def carried(family: HfFamily, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that a family carries with their values, as far as these are null or whole numbers."""
    found = {key: said[key] for key in family.carried if key in said}
    numbers = {key: one if isinstance(one, list) else [] if one is None else [one] for key, one in found.items()}
    return {key: one for key, one in found.items() if all(type(number) is int for number in numbers[key])}


def _keys(described: Mapping[str, Any], section: str, whole: HfWhole | None) -> Mapping[str, Any]:
    """Return the keys of a section, with what a whole model says of it.

    Of a composed model either place may tie the embeddings, as in transformers.
    """
    decided = {} if whole is None else whole.keys(described)
    if not section:
        return {**described, **decided}
    tied = {TIED: True} if described.get(TIED) else {}
    return {**described[section], **tied, **decided}


def _sections(described: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """Yield all of a ``config.json``, and its sections that have a ``model_type`` of their own.

    One that is called as the whole is but a part of it: so does Qwen2-VL's vision in folders of transformers 4.
    """
    for section, one in [("", described), *described.items()]:
        kind = one.get("model_type") if isinstance(one, Mapping) else None
        if isinstance(kind, str) and not (section and kind == described.get("model_type")):
            yield section, (kind, one)
