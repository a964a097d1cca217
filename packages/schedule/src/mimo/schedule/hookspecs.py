"""Hooks of the kind that this package owns: schedules."""

from __future__ import annotations

from mimo.hooks import hookspec
from mimo.schedule.plan import ScheduleSpec


@hookspec
def mimo_register_schedules() -> list[ScheduleSpec]:  # type: ignore[empty-body]
    """Return the schedules of this plugin (entry-point group ``mimo.schedules``)."""
