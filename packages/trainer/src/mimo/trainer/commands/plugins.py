"""``mimo plugins``: list installed plugins, or check one. ``mimo models``: the published models that they read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mimo.hooks import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mimo.hooks import PluginEntry, PluginFailure


def plugins(*settings: str, check: str | None = None) -> int:
    """List what is installed: name, distribution, version and hooks of each plugin.

    Args:
        settings: with --check, settings of the plugin's config: key=value.
        check: a plugin of any kind to look at instead: whether it keeps the promises that training rests on. Encoders,
            language models and generators are looked at whole, of other kinds what one process can see. Ends with 0 if
            it does, 1 if it breaks one.
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


def models(
    model: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """List the families of published models that installed plugins read, or try one.

    Args:
        model: the model_type of a config.json, or a published folder; tries now what each plugin can do with this
            family, or with what the folder says, and prints of each axis whether it can be split along it, or why not.
            Of a whole model, whose type doesn't say enough, it prints what is recorded. Ends with 0 if a plugin can
            train it, or all that the folder holds; else with 1.
        as_json: print it as JSON.
    """
    from pathlib import Path

    import attrs

    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.commands.tables.models import show_families, show_trials
    from mimo.trainer.published.families import installed_families, try_family, try_folder
    from mimo.trainer.published.part import CONFIG_NAME

    if model:
        is_folder = (Path(model) / CONFIG_NAME).exists()
        trials = try_folder(Path(model)) if is_folder else try_family(model)
        shown, lines = [attrs.asdict(one) for one in trials], show_trials(trials)
        code = int((any if is_folder else all)(one.problem for one in trials))
    else:
        families = installed_families()
        shown, lines, code = [attrs.asdict(one) for one in families], show_families(families), 0
    if as_json:
        print(json.dumps(shown, indent=1))
        return code
    console = make_console()
    for line in lines:
        console.print(line)
    return code


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
