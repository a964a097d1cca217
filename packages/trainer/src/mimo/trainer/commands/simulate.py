"""``mimo simulate``: simulate one step and write its timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def simulate(
    file: Path,
    /,
    *overrides: str,
    profile: Annotated[Path | None, Parameter(show_default=False)] = None,
    plan: Annotated[Path | None, Parameter(show_default=False)] = None,
    out: Path = Path(),
) -> None:
    """Play one step of FILE through, and write its timeline: trace.json and timeline.html. Nothing is launched.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        profile: costs that `mimo profile` measured, as schedule.profile; without any they follow from a formula.
        plan: a plan to prove and simulate in place of the schedule's, such as a run's plan.json.
        out: folder to write into.
    """
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.commands.tables.simulation import read_plan, show_simulated, simulate_job
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_logging

    given = () if profile is None else (f"schedule.profile={json.dumps(str(profile))}",)
    settings = read_settings(file, (*overrides, *given))
    check_logging(settings)
    job = resolve(settings)
    show_simulated(make_console(), simulate_job(job if plan is None else read_plan(job, plan), out))
