"""A module that a published Hugging Face folder holds, read from its ``config.json``. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from mimo.checkpoint import read_published_json
from mimo.hooks import ConfigError
from mimo.model import GeneratorSpec, HfFamily, HfWhole
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.published.readers import Reader

CONFIG_NAME = "config.json"
TIED = "tie_word_embeddings"


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
        kind = {"fed_by": LANGUAGE} if isinstance(self.reader.spec, GeneratorSpec) else {}
        ignored = {"ignore": list(self.ignored)} if self.ignored else {}
        return {"plugin": self.reader.spec.name, **kind, **ignored, "config": {key: plain[key] for key in self.given}}


def read_part(
    folder: Path,
    described: Mapping[str, Any],
    section: str,
    reader: Reader,
    *,
    said: Mapping[str, Any],
    ignore: Collection[str],
) -> HfPart:
    """Return a module as its folder says.

    Args:
        folder: of the files.
        described: its ``config.json``.
        section: of that which describes the module, empty for all of it.
        reader: what reads it.
        said: the keys that the family is given, see `keys_of`.
        ignore: those of them that are set aside, as far as the family can.

    Raises:
        ConfigError: a setting of the folder is one that ours can't do.
    """
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
        return read_part(folder, described, "", part.reader, said=described, ignore=part.ignored)
    said = keys_of(described, whole.section, whole)
    found = read_part(folder, described, whole.section, part.reader, said=said, ignore=part.ignored)
    kept = {key: getattr(part.config, key) for key in decided if key in part.given}
    return attrs.evolve(found, config=attrs.evolve(found.config, **kept))


def carried(family: HfFamily, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that a family carries with their values, as far as these are null or whole numbers."""
    found = {key: said[key] for key in family.carried if key in said}
    numbers = {key: one if isinstance(one, list) else [] if one is None else [one] for key, one in found.items()}
    return {key: one for key, one in found.items() if all(type(number) is int for number in numbers[key])}


def keys_of(described: Mapping[str, Any], section: str, whole: HfWhole | None) -> Mapping[str, Any]:
    """Return the keys of a section, with what a whole model says of it.

    Of a composed model either place may tie the embeddings, as in transformers.
    """
    decided = {} if whole is None else whole.keys(described)
    if not section:
        return {**described, **decided}
    tied = {TIED: True} if described.get(TIED) else {}
    return {**described[section], **tied, **decided}
