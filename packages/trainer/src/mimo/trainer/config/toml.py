"""A run's file and the ``key=value`` words of the command line, as one `Settings`; and settings as TOML again."""

from __future__ import annotations

import datetime as dt
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from mimo.hooks import ConfigError
from mimo.trainer.config.fields import own_keys
from mimo.trainer.config.names import CONFIG_FILE, PLAN_FILE
from mimo.trainer.config.plain_values import MAX_DEPTH, MAX_FILE_BYTES, check_plain_values, too_deep, too_long_a_number
from mimo.trainer.config.renamed import check_renamed, with_new_names
from mimo.trainer.config.settings import Settings
from mimo.trainer.config.structure import kinds_of, structure


def read_settings(source: Path | str | Mapping[str, Any], overrides: Iterable[str] = ()) -> Settings:
    """Return the settings of a TOML file, or of a mapping that holds what such a file would, with overrides.

    Args:
        source: the file, or the mapping: tables as mappings, lists, text, numbers and truth values.
        overrides: settings that differ, as key=value, the last one of a key counts.

    A file that a run has saved in its directory may hold old names of settings; see `renamed`.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, missing or wrong.
    """
    if isinstance(source, Mapping):
        return make_settings(source, overrides)
    path = Path(source)
    table = read_table(path)
    is_saved = path.name == CONFIG_FILE and (path.parent / PLAN_FILE).is_file()
    return make_settings(with_new_names(table) if is_saved else table, overrides)


def make_settings(table: Mapping[str, Any], overrides: Iterable[str] = ()) -> Settings:
    """Return the settings of a file's plain data, with overrides.

    Raises:
        ConfigError: a setting is unknown, missing or wrong.
    """
    for override in overrides:
        _check_section(override)
        table = override_key(table, override)
    check_plain_values(table)
    check_renamed(table)
    _check_modules(table.get("modules"))
    return structure(table, Settings, "")


def read_table(path: Path) -> Mapping[str, Any]:
    """Return a TOML file as plain data.

    Raises:
        ConfigError: it is missing, too large, or not TOML.
    """
    try:
        return tomllib.loads(_read_bytes(path).decode("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), expected="a TOML file", got=f"one that is broken: {error}") from error
    except RecursionError:
        raise too_deep(str(path)) from None
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), expected="a readable file", got=_why(error), fix="Write one with: mimo init FILE."
        ) from error
    except ValueError:  # what Python says of a number whose digits it won't read
        raise too_long_a_number(str(path)) from None


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)  # a device may never end
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(str(path), expected=f"a file of at most {MAX_FILE_BYTES} bytes", got="a larger one")
    return data


def override_key(table: Mapping[str, Any], override: str) -> Mapping[str, Any]:
    """Return ``table`` with one ``key=value`` set, tables on the way made where they are missing.

    A key that holds dots stands in quotes, as in TOML: ``optimizer.patterns."vision.*".lr=1e-4``.

    Raises:
        ConfigError: there is no ``=``, or the way leads through something that is no table.
    """
    path, equals, text = override.partition("=")
    keys = _keys(path)
    if not equals or not keys or not all(keys):
        raise ConfigError(repr(override), expected="key=value", got="something else", fix="For example: run.steps=50.")
    if len(keys) > MAX_DEPTH:
        raise too_deep(keys[0])
    try:
        value = parse_value(text)
    except RecursionError:
        raise too_deep(path) from None
    except ValueError:
        raise too_long_a_number(path) from None
    return set_key(table, keys, value)


def parse_value(text: str) -> Any:
    """Return a value as TOML reads it; what is no TOML value is the text itself, so that ``0-3`` needs no quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    value = table["value"]
    # A second line is not part of a value, and no setting is a date.
    if len(table) > 1 or isinstance(value, dt.date | dt.time):
        return text.strip()
    return value


def write_config(table: Mapping[str, Any], path: Path) -> None:
    """Write plain data, such as a job's resolved settings, as TOML that reads back as the same settings.

    The file is there complete or not at all; see `write_atomically`.
    """
    write_atomically(path, tomli_w.dumps(table))


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there complete or not at all, whenever the process or the machine ends."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _keys(path: str) -> list[str]:
    """Return the keys on a path, none of one that TOML cannot read; without quotes anything goes between dots."""
    if '"' not in path:
        return [key.strip() for key in path.split(".")]
    try:
        table: Any = tomllib.loads(f"{path} = 0")
    except (ValueError, RecursionError):
        return []
    keys = []
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return keys


def _why(error: Exception) -> str:
    """Return why a file cannot be read, in words for the two usual causes."""
    if isinstance(error, IsADirectoryError):
        return "a folder"
    return "nothing: there is no such file" if isinstance(error, FileNotFoundError) else str(error)


def _check_section(override: str) -> None:
    """Refuse ``steps=50``, naming the section that has such a key: no setting stands outside of one.

    Raises:
        ConfigError: naming the key.
    """
    written, equals, value = override.partition("=")
    key, kinds = written.strip(), kinds_of(Settings)
    homes = [name for name, kind in kinds.items() if attrs.has(kind) and key in own_keys(kind)]
    if equals and homes and key not in kinds:
        fixes = " or ".join(f"{home}.{key}={value}" for home in homes)
        raise ConfigError(key, expected="a key with its section", got="one without", fix=f"Write {fixes}.")


def _check_modules(modules: Any) -> None:
    """Refuse a table of settings of a misspelt module, which would be a module without a plugin.

    Raises:
        ConfigError: naming the module that is meant.
    """
    if not isinstance(modules, Mapping):
        return  # refused with everything else
    complete = [name for name, table in modules.items() if isinstance(table, Mapping) and "plugin" in table]
    for name in modules:
        near = difflib.get_close_matches(name, complete, n=1)
        if near and name not in complete:
            where, fix = f"modules.{name}", f"Did you mean {near[0]!r}? A module of its own needs a plugin."
            raise ConfigError(where, expected="a module that there is", got=f"{name!r}, which has no plugin", fix=fix)


def set_key(table: Any, keys: list[str], value: Any, where: str = "") -> Mapping[str, Any]:
    """Return a table with the value of one key, on a path of keys, tables on the way made where they are missing.

    Raises:
        ConfigError: the path leads through something that is no table.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(where, expected="a table", got=repr(table), fix=f"It has no key {keys[0]!r}.")
    key, *below = keys
    if below:
        value = set_key(table.get(key, {}), below, value, f"{where}.{key}" if where else key)
    return {**table, key: value}
