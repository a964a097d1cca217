"""``mimo check``: show what a file would run, without launching it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def check(file: Path, /, *overrides: str, elsewhere: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Show what FILE would run: grids, memory, the plan, and what the first step sends. Nothing is launched.

    How long a rank takes to read the samples of a step is measured, in about a second.

    What `mimo train` would refuse is refused here too.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        elsewhere: leave out what only the machine that trains can answer: its folders, GPUs and plugins.
    """
    from mimo.launch import check_unlocked, with_slurm
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.commands.tables.job import show_job
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resume.directory import check_writable
    from mimo.trainer.run.begin import LEFT_TO_THE_MACHINE, resolve_run

    settings = read_settings(file, overrides)
    environ = with_slurm(os.environ)
    job = resolve_run(settings, environ, elsewhere=elsewhere)
    if not elsewhere:  # what training finds out by taking its directory
        check_unlocked(job.directory)
        check_writable(job.directory)

    from mimo.launch import ranks_of_machine
    from mimo.trainer.batch.balance import step_balance
    from mimo.trainer.commands.tables.reading import ReadingTime, show_reading
    from mimo.trainer.cost.memory import estimate_memory
    from mimo.trainer.cost.module_stats import module_stats
    from mimo.trainer.cost.parameter_names import check_patterns_of, followers
    from mimo.trainer.cost.sample_stats import SampleStats
    from mimo.trainer.job.compilation import compilations
    from mimo.trainer.resume.attempt import last_attempt
    from mimo.trainer.resume.data_order import order_changes
    from mimo.trainer.resume.resume_point import find_source
    from mimo.trainer.step.traffic import expect_traffic

    source = None if elsewhere else find_source(settings, last=last_attempt(job.directory, environ))
    check_patterns_of(job)
    reading = () if job.train is None else tuple(show_reading(job, ReadingTime.of(job)))
    show_job(
        make_console(),
        job,
        estimate_memory(job),
        () if job.train is None else expect_traffic(job, 1),
        followers=dict(followers(job)),
        stats=list(module_stats(job, SampleStats.of(job))),
        machine=ranks_of_machine(environ, job.world),
        changes=() if source is None else order_changes(job, source),
        compiled=compilations(job).items(),
        reading=reading,
        balance=None if job.train is None else partial(step_balance, job, 1),
    )
    if elsewhere:
        data = (
            ""
            if job.train is not None
            else "; the data, which are not here, so that samples of text alone stand for them"
        )
        print(f"\nnot looked at, as only the machine that trains can answer it: {LEFT_TO_THE_MACHINE}{data}")
