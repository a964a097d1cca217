"""Which columns of a table a sample is made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pyarrow as pa

from mimo.hooks import ConfigError

_NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages", "conversations"),
    "tools": ("tools",),
    "images": ("images", "image"),
    "audio": ("audio", "audios"),
    "roles": ("roles",),
    "weight": ("weight",),
}
"""What columns are called where no setting names them."""
_EITHER = ("text", "messages")
"""A table has one of these."""
_SHOWN = 20
"""Names of columns in a message."""


@attrs.frozen(kw_only=True)
class ColumnSettings:
    """Settings of ``[data.columns]``: names of columns, where they are not those that data usually has.

    Args:
        text: of texts; else ``text``.
        messages: of conversations; else ``messages`` or ``conversations``.
        tools: that conversations may call; else ``tools``.
        images: of one image or a list of them; else ``images`` or ``image``.
        audio: of clips; else ``audio`` or ``audios``.
        roles: of what the model does with each item; else ``roles``.
        weight: of how much a sample counts; else ``weight``.
        items: for other modalities the columns of their items.
    """

    text: str = ""
    messages: str = ""
    tools: str = ""
    images: str = ""
    audio: str = ""
    roles: str = ""
    weight: str = ""
    items: Mapping[str, str] = attrs.field(factory=dict)

    @items.validator
    def _check_items(self, _attribute: Any, value: Mapping[str, str]) -> None:
        for modality, key in (("image", "images"), ("audio", "audio")):
            if modality in value:
                msg = f"expected the column of modality {modality!r} in {key!r}, got it in 'items'"
                raise ValueError(msg)


@attrs.frozen(kw_only=True)
class SampleColumns:
    """The columns that are read.

    Args:
        keys: of a record's keys the columns that hold their values.
        items: of other modalities likewise.
    """

    keys: Mapping[str, str]
    items: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys([*self.keys.values(), *self.items.values()]))


def find_columns(schema: pa.Schema, settings: ColumnSettings, where: str) -> SampleColumns:
    """Return the columns of a table that samples are made of.

    Args:
        schema: of the table.
        settings: which name columns.
        where: file, for messages.

    Raises:
        ConfigError: a column that is named isn't there, there is neither a text nor messages, or both.
    """
    names = list(schema.names)
    named = dict(_named(settings, names, where))
    keys = dict(named)
    for key, usual in _NAMES.items():
        if key in named or (key in _EITHER and any(other in named for other in _EITHER)):
            continue
        present = [name for name in usual if name in names]
        if len(present) > 1:
            raise _choose(f"data.columns.{key}", present, where)
        if present:
            keys[key] = present[0]
    both = [keys[key] for key in _EITHER if key in keys]
    if len(both) > 1:
        raise _choose("data.columns.text or data.columns.messages", both, where)
    if not both:
        raise _none(names, where)
    if "messages" not in keys and not settings.tools:
        keys.pop("tools", None)
    found = SampleColumns(keys=keys, items=settings.items)
    for name in found.names:
        check_column(schema, name, where)
    return found


def check_column(schema: pa.Schema, name: str, where: str) -> None:
    """Refuse a table in which a column is not exactly once, or is of a type that a library has registered.

    Raises:
        ConfigError: so it is.
    """
    count = schema.names.count(name)
    if count != 1:
        got = f"{where} with columns {_shown(schema.names)}"
        raise ConfigError("data.columns", expected=f"one column {name!r} in each file", got=got)
    kind = schema.field(name).type
    if any(isinstance(each, pa.BaseExtensionType) for each in _types(kind)):
        fix = "Save it as plain text, bytes, lists or structs."
        raise ConfigError(
            "data.columns", expected=f"a plain type of column {name!r}", got=f"{kind} in {where}", fix=fix
        )


def _types(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    if not isinstance(kind, pa.BaseExtensionType):
        for number in range(kind.num_fields):
            yield from _types(kind.field(number).type)


def _named(settings: ColumnSettings, names: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    for key in _NAMES:
        if name := getattr(settings, key):
            _check_named(f"data.columns.{key}", name, names, where)
            yield key, name
    for modality, name in settings.items.items():
        _check_named(f"data.columns.items.{modality}", name, names, where)


def _check_named(setting: str, name: str, names: Sequence[str], where: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            setting,
            expected=f"one of the columns {_shown(names)} of {where}",
            got=repr(name),
            fix=f"Did you mean {near[0]!r}?" if near else "",
        )


def _choose(setting: str, names: Sequence[str], where: str) -> ConfigError:
    said = " and ".join(map(repr, names))
    return ConfigError(setting, expected=f"the name of one of the columns {said} of {where}", got="none")


def _none(names: Sequence[str], where: str) -> ConfigError:
    wanted = [name for key in _EITHER for name in _NAMES[key]]
    near = [name for each in wanted for name in difflib.get_close_matches(each, names, n=1)]
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return ConfigError(
        "data.columns",
        expected="a column 'text', 'messages' or 'conversations'",
        got=f"{where} with columns {_shown(names)}",
        fix=f"{hint}Name the column in data.columns.text or data.columns.messages.",
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(map(repr, names[:_SHOWN])) or "none") + more
