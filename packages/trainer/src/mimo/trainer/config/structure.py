"""Tables into attrs classes, strictly, and back: every key known, no value converted silently, errors with full path.

Written by hand, since a general structuring library converts what it can (``"3"`` to 3, text to a list of letters):
nearly each of its hooks would have to be replaced.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from mimo.hooks import ConfigError, PluginError, UserError
from mimo.topology import Ranks, parse_ranks, show_ranks
from mimo.trainer.config.fields import own_keys, rest_field
from mimo.trainer.config.plain_values import join_path

C = TypeVar("C")
_NOUNS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Ranks: 'ranks such as "0-3"',
}


def structure(table: Any, cls: type[C], where: str, *, siblings: Iterable[str] = ()) -> C:
    """Return ``cls`` made of a table.

    Args:
        table: plain data as TOML gives it.
        cls: an attrs class; a field made with `rest` takes the keys that are no other field's.
        where: path of the table, empty for the whole file.
        siblings: keys that are known in the table beside those of ``cls``, for suggestions.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong; named by its full path.
        PluginError: the types of ``cls`` cannot be resolved.
    """
    if not isinstance(table, Mapping):
        raise _mismatch(where, "a table", table)
    rest = rest_field(cls)
    own = own_keys(cls)
    unknown = [key for key in table if key not in own]
    if rest is None and unknown:
        raise ConfigError(
            join_path(where, unknown[0]),
            expected="a known key",
            got="an unknown one",
            fix=suggest(unknown[0], [*own, *siblings]),
        )
    try:
        kinds = kinds_of(cls)
    except NameError as error:
        raise PluginError(
            f"{cls.__module__}.{cls.__qualname__}",
            expected="types of settings that can be resolved",
            got=str(error),
            fix="Import them outside of TYPE_CHECKING.",
        ) from error
    values: dict[str, Any] = {} if rest is None else {rest: {key: table[key] for key in unknown}}
    for field in attrs.fields(cast("type[attrs.AttrsInstance]", cls)):
        if field.name in own and field.name in table:
            values[field.name] = _value(table[field.name], kinds[field.name], join_path(where, field.name))
        elif field.name in own and field.default is attrs.NOTHING:
            raise ConfigError(
                join_path(where, field.name), expected=_noun(kinds[field.name]), got="nothing", fix="Set it."
            )
    try:
        return cls(**values)
    except UserError as error:
        raise type(error)(
            _full_path(where, error.where, own), expected=error.expected, got=error.got, fix=error.fix
        ) from error
    except (ValueError, TypeError) as error:
        raise _of_validator(where, own, error) from error


def unstructure(value: Any) -> Any:
    """Return the plain data that `structure` reads back; what is None is left out, as TOML has no such value."""
    if attrs.has(type(value)):
        rest, kinds = rest_field(type(value)), kinds_of(type(value))
        table: dict[str, Any] = {
            name: show_ranks(one) if kinds[name] is Ranks else unstructure(one)
            for name, one in ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
            if one is not None
        }
        return table if rest is None else {**{key: one for key, one in table.items() if key != rest}, **table[rest]}
    if isinstance(value, Mapping):
        return {key: unstructure(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [unstructure(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def kinds_of(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a class's fields by name; to read them from its annotations takes half of `structure`.

    Raises:
        NameError: one of them cannot be resolved.
    """
    return _kinds_of(cast("Hashable", cls))


@functools.cache
def _kinds_of(cls: Hashable) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def suggest(got: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest known key, or else all of them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(got, names, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known here: {', '.join(names)}." if names else "No keys are known here."


def _value(value: Any, kind: Any, where: str) -> Any:
    read: Callable[[Any, Any, str], Any] = _plain
    if kind is Ranks:
        read = _ranks
    elif get_origin(kind) in {Union, types.UnionType}:
        read = _union
    elif get_origin(kind) is Literal:
        read = _literal
    elif isinstance(kind, type) and attrs.has(kind):
        read = _class
    elif _is_table(kind):
        read = _table
    elif _is_list(kind):
        read = _list
    return read(value, kind, where)


def _class(value: Any, kind: Any, where: str) -> Any:
    return structure(value, kind, where)


def _table(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _mismatch(where, "a table", value)
    inner = get_args(kind)[1] if get_args(kind) else Any
    return {key: _value(one, inner, join_path(where, key)) for key, one in value.items()}


def _literal(value: Any, kind: Any, where: str) -> Any:
    if value not in get_args(kind):
        raise _mismatch(where, _noun(kind), value, suggest_from=get_args(kind))
    return value


def _plain(value: Any, kind: Any, where: str) -> Any:
    if kind is Any or kind is object:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _mismatch(where, _noun(kind), "an integer too large for one") from None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise _mismatch(where, _noun(kind), value) from None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _mismatch(where, _noun(kind), value)
    return value


def _list(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _mismatch(where, "a list", value)
    arguments = get_args(kind)
    make = list if (get_origin(kind) or kind) is list else tuple
    if make is tuple and get_origin(kind) is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise _mismatch(where, f"a list of {len(arguments)}", value)
        return tuple(
            _value(one, item, f"{where}[{index}]")
            for index, (one, item) in enumerate(zip(value, arguments, strict=True))
        )
    item = arguments[0] if arguments else Any
    return make(_value(one, item, f"{where}[{index}]") for index, one in enumerate(value))


def _union(value: Any, kind: Any, where: str) -> Any:
    """Try the arms in turn; the error of an arm is raised only if it alone fits the value's shape.

    What may be left out is taken back by the text ``none``, unless that is one of its values.
    """
    arms = get_args(kind)
    if value == "none" and type(None) in arms and not any("none" in get_args(arm) for arm in arms):
        return None
    failures: list[ConfigError] = []
    for arm in arms:
        if arm is type(None):
            continue
        try:
            return _value(value, arm, where)
        except ConfigError as error:
            failures.append(error)
    deeper = [error for error in failures if error.where != where]
    raise deeper[0] if len(deeper) == 1 else _mismatch(where, _noun(kind), value)


def _ranks(value: Any, _kind: Any, where: str) -> Ranks:
    try:
        return parse_ranks(value)
    except ConfigError as error:
        raise ConfigError(where, expected=error.expected, got=error.got, fix=error.fix) from None


def _is_table(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, str | bytes)


def _noun(kind: Any) -> str:
    if kind in _NOUNS:
        return _NOUNS[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind))) if len(get_args(kind)) > 1 else repr(get_args(kind)[0])
    if get_origin(kind) in {Union, types.UnionType}:
        return " or ".join(_noun(arm) for arm in get_args(kind) if arm is not type(None))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in kind)
    return "a list" if _is_list(kind) else "a table"


def _mismatch(where: str, expected: str, got: Any, suggest_from: Sequence[Any] = ()) -> ConfigError:
    near = difflib.get_close_matches(str(got), [str(one) for one in suggest_from], n=1)
    fix = f"Did you mean {near[0]!r}?" if near else ""
    if expected == "text" and isinstance(got, bool | int | float):
        fix = f'Write it in quotes: "{got}".'
    return ConfigError(where, expected=expected, got=repr(got), fix=fix)


def _full_path(where: str, named: str, own: Sequence[str]) -> str:
    """Return the full path of a setting that a class named by its own name, or by the path that it usually has."""
    keys = named.split(".")
    first = next((index for index, key in enumerate(keys) if key in own), None)
    if first is not None:
        return functools.reduce(join_path, keys[first:], where)
    return named if named == where or named.startswith(f"{where}.") else join_path(where, named)


def _of_validator(where: str, own: Sequence[str], error: Exception) -> ConfigError:
    """Return the error of a third-party validator; those of attrs start with the name of the field."""
    text = str(error.args[0]) if error.args else str(error)
    named = re.match(r"'(\w+)' ", text)
    place = join_path(where, named[1]) if named is not None and named[1] in own else where
    return ConfigError(place, expected="a valid value", got=f"one that is refused: {text}")
