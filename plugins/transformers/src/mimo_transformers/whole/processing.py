"""The settings of images as a file has them: a table of plain values with the name of a kind."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_origin, get_type_hints

import attrs

from mimo.hooks import ConfigError
from mimo_transformers.images import KINDS, ImageProcessing

_KIND = "kind"
_WHERE = "config.images"


def processing_from(images: Mapping[str, Any]) -> ImageProcessing:
    """Return what a table of settings means.

    Raises:
        ConfigError: a key is missing, unknown or of another type, or a value is out of range.
    """
    kind = images.get(_KIND)
    if not isinstance(kind, str) or kind not in KINDS:
        fix = "`mimo checkpoint import-hf DIR` prints the settings that a published folder means."
        raise ConfigError(f"{_WHERE}.{_KIND}", expected=f"one of {', '.join(KINDS)}", got=repr(kind), fix=fix)
    made = KINDS[kind]
    types = get_type_hints(made)
    fields = {field.name: types[field.name] for field in attrs.fields(made)}
    needed = [field.name for field in attrs.fields(made) if field.default is attrs.NOTHING]
    given = {key: _plain(value) for key, value in images.items() if key != _KIND}
    for key, value in given.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            fix = f"Did you mean {near[0]!r}?" if near else f"Its keys are {', '.join(fields)}."
            raise ConfigError(f"{_WHERE}.{key}", expected=f"a key of {kind!r}", got="an unknown one", fix=fix)
        if not _fits(value, fields[key]):
            raise ConfigError(f"{_WHERE}.{key}", expected=_called(fields[key]), got=repr(value))
    for key in needed:
        if key not in given:
            raise ConfigError(f"{_WHERE}.{key}", expected=_called(fields[key]), got="nothing")
    try:
        return made(**given)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.{error.where}", expected=error.expected, got=error.got, fix=error.fix) from error


def settings_of(processing: ImageProcessing) -> dict[str, Any]:
    """Return the table that means it, without what is as by default."""
    own = {
        field.name: getattr(processing, field.name)
        for field in attrs.fields(type(processing))
        if getattr(processing, field.name) != field.default
    }
    return {_KIND: processing.kind, **own}


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is float:
        return type(value) in {int, float}
    if wanted in {int, bool, str}:
        return type(value) is wanted
    return isinstance(value, tuple) == (get_origin(wanted) is tuple)


def _called(wanted: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(wanted) or ("a list" if get_origin(wanted) is tuple else "a text")
