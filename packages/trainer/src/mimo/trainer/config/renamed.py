"""Settings with a new name: the old one is refused in new files, and replaced in those that a run has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.trainer.config.plain_values import join_path


@attrs.frozen(kw_only=True)
class RenamedValue:
    """A value of a setting that has another name now.

    Args:
        settings: paths of the keys that may hold it; ``*`` stands for any one key on the way.
        old: the value that saved files hold.
        new: the value that takes its place.
    """

    settings: Sequence[str]
    old: str
    new: str


RENAMED = (
    RenamedValue(
        settings=(
            "optimizer.plugin",
            "optimizer.patterns.*.plugin",
            "modules.*.optimizer.plugin",
            "modules.*.optimizer.patterns.*.plugin",
        ),
        old="hybrid",
        new="cpu-offload",
    ),
)
"""All of them."""


def check_renamed(table: Mapping[str, Any]) -> None:
    """Refuse old names.

    Args:
        table: the plain data of a whole file, overrides included.

    Raises:
        ConfigError: naming the setting and its new value.
    """
    for renamed in RENAMED:
        for setting in renamed.settings:
            _visit(table, setting.split("."), renamed, "", refuses=True)


def with_new_names(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plain data of a file that a run has saved, its old names replaced by the new ones."""
    for renamed in RENAMED:
        for setting in renamed.settings:
            table = _visit(table, setting.split("."), renamed, "", refuses=False)
    return table


def _visit(value: Any, keys: Sequence[str], renamed: RenamedValue, where: str, *, refuses: bool) -> Any:
    """Return ``value`` with the new name at the end of ``keys``; or refuse the old one there."""
    if not keys:
        if value != renamed.old:
            return value
        if refuses:
            raise ConfigError(
                where,
                expected=f"{renamed.new!r}, the new name of {renamed.old!r}",
                got=repr(renamed.old),
                fix=f"Write {renamed.new!r}.",
            )
        return renamed.new
    if not isinstance(value, Mapping):
        return value
    key, *below = keys
    chosen = set(value) if key == "*" else {key}
    return {
        name: _visit(item, below, renamed, join_path(where, name), refuses=refuses) if name in chosen else item
        for name, item in value.items()
    }
