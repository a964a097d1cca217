"""How one setting is declared: its default, its comment in `mimo init`, and the validators that settings share.

Validators name the setting alone; whoever structures a table puts the table's path before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from mimo.hooks import OTHER_KEYS, ConfigError, Validator

COMMENT = "comment"


def setting(comment: str, *, default: Any = attrs.NOTHING, validator: Sequence[Validator] = ()) -> Any:
    """Declare a setting; without a default it is required."""
    return attrs.field(default=default, validator=list(validator), metadata={COMMENT: comment})


def rest(comment: str) -> Any:
    """Declare the field that takes the keys of a table that belong to its plugin."""
    return attrs.field(factory=dict, metadata={COMMENT: comment, OTHER_KEYS: True})


def own_keys(cls: type) -> tuple[str, ...]:
    """Return the keys of a table that are not its plugin's."""
    return tuple(field.name for field in attrs.fields(cls) if not field.metadata.get(OTHER_KEYS))


def rest_field(cls: type) -> str | None:
    """Return the name of the field that takes the plugin's keys, if the class has one."""
    return next((field.name for field in attrs.fields(cls) if field.metadata.get(OTHER_KEYS)), None)


def not_empty(_instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse empty text."""
    if not value:
        raise ConfigError(attribute.name, expected="some text", got="''")


def one_folder(_instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse text that cannot be the name of one folder."""
    if not value or value in {".", ".."} or set(value) & set("/\\\0"):
        raise ConfigError(attribute.name, expected="a name that can be a folder's", got=repr(value))
