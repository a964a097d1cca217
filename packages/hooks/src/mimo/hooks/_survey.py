"""Every installed plugin as a row, broken ones included, for commands that list them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from mimo.hooks._discovery import Kind, examine
from mimo.hooks._installed import PluginEntry, PluginFailure
from mimo.hooks._lifecycle import examine_lifecycle


def survey(
    kinds: Iterable[Kind[Any]], *, entry_points: Iterable[EntryPoint] | None = None
) -> list[PluginEntry | PluginFailure]:
    """Return a row for each plugin of ``kinds``, in their order, and then of the lifecycle group.

    A plugin that `discover` or `lifecycle` would refuse is a `PluginFailure` that holds the very error.

    Args:
        kinds: what to look for.
        entry_points: look among these instead of what is installed.
    """
    given = None if entry_points is None else tuple(entry_points)
    return [*(row for kind in kinds for row in examine(kind, given)), *examine_lifecycle(given)]
