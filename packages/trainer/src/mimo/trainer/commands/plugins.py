"""``mimo plugins``: list installed plugins, or check one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mimo.hooks import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mimo.hooks import PluginEntry, PluginFailure


def plugins(*settings: str, check: str | None = None) -> int:
    """List what is installed: name, distribution, version and hooks of each plugin.

    Args:
        settings: with --check, settings of the plugin's config: key=value.
        check: a plugin of any kind to look at instead: whether it keeps the promises that training rests on. Encoders
            and language models are looked at whole, of other kinds what one process can see. Ends with 0 if it does, 1
            if it breaks one.
    """
    from mimo.hooks import survey
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.config.plugin_kinds import KINDS

    if check is not None:
        from mimo.trainer.commands.plugin_checks.check import check_plugin

        broken = 0
        for verdict in check_plugin(check, settings):
            print(verdict, flush=True)
            broken += verdict.broken is not None
        return int(broken > 0)
    if settings:
        raise ConfigError("plugins", expected="no settings without --check", got=repr(settings[0]))
    make_console().print(_table(survey(KINDS)))
    return 0


def _table(rows: Iterable[PluginEntry | PluginFailure]) -> Table:
    """Return a table of installed plugins, those that cannot be used included."""
    from rich.table import Table
    from rich.text import Text

    from mimo.hooks import PluginFailure

    table = Table(box=None, pad_edge=False)
    for heading in ("group", "name", "registers", "distribution", "version", "hooks"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        if isinstance(row, PluginFailure):
            table.add_row(row.group, row.name, "", row.distribution, row.version, Text(f"cannot be used: {row.error}"))
        else:
            table.add_row(
                row.group, row.name, ", ".join(row.specs), row.distribution, row.version, ", ".join(row.hooks)
            )
    return table
