"""Errors of a dataset that is a source of another one, by the path that its settings have there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mimo.hooks import ConfigError

_USUAL = "data"
"""Where the settings of a dataset are, if it is not a source."""


@contextmanager
def settings_under(path: str) -> Iterator[None]:
    """Raise a `ConfigError` by the path of a source's table where it names ``data.<key>``, as if it were no source."""
    try:
        yield
    except ConfigError as error:
        first, _, key = error.where.partition(".")
        if first != _USUAL or path == _USUAL or f"{error.where}.".startswith(f"{path}."):
            raise
        where = f"{path}.{key}" if key else path
        raise ConfigError(where, expected=error.expected, got=error.got, fix=error.fix) from error
