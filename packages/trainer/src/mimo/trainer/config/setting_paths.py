"""Plugins whose errors name settings by the table of the module that uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs

from mimo.hooks import ConfigError, PluginError

S = TypeVar("S")
_CONFIG = "config"
_USUAL = (_CONFIG, f"modules.language.{_CONFIG}")
"""How plugins name the table of their settings, as they don't know which module has it."""


def naming_settings(spec: S, where: str) -> S:
    """Return a plugin whose functions name settings by their full path, also of what it is made of.

    Args:
        spec: an attrs class; says ``config.width``, or ``modules.language.config.width`` whatever the module's name is.
        where: path of the module's table.
    """
    changes: dict[str, Any] = {}
    for field in attrs.fields(cast("Any", type(spec))):
        value = getattr(spec, field.name)
        if attrs.has(type(value)):
            changes[field.name] = naming_settings(value, where)
        elif callable(value) and not isinstance(value, type):
            changes[field.name] = _Naming(function=value, where=where)
    return cast("S", attrs.evolve(cast("Any", spec), **changes))


@attrs.frozen(kw_only=True)
class _Naming:
    """A function of a plugin; equal to another that does the same."""

    function: Callable[..., Any]
    where: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except (ConfigError, PluginError) as error:
            path = _full_path(error.where, self.where)
            if path == error.where:
                raise
            raise type(error)(path, expected=error.expected, got=error.got, fix=error.fix) from error


def _full_path(path: str, where: str) -> str:
    usual = next((one for one in _USUAL if path == one or path.startswith(f"{one}.")), None)
    return path if usual is None else f"{where}.{_CONFIG}{path.removeprefix(usual)}"
