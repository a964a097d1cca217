"""The end of a run: what lifecycle plugins and pictures do wrong there is reported once, and changes no exit code."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from mimo.hooks import Lifecycle, RunError, RunInfo, UserError, plain_text
from mimo.topology.collectives import all_gather_json


def end_run(
    plugins: Lifecycle, run: RunInfo, draw: Callable[[], None], *, group: dist.ProcessGroup | None = None
) -> None:
    """Draw what is drawn at the end, call `mimo_run_end` of all plugins, and report what failed, once; collective.

    By now everything is trained and saved, so the run has come to what it has come to.

    Args:
        plugins: all of this rank.
        run: which ends.
        draw: draws pictures on the rank that can.
        group: in which all ranks meet; None for the default group.
    """
    failures = [*_drawn(draw, run), *plugins.run_end(run)]
    everybody = all_gather_json([str(failure) for failure in failures], group)
    elsewhere = {text for texts in everybody[: run.rank] for text in texts}
    report_failures([failure for failure in failures if str(failure) not in elsewhere])


def report_failures(failures: Sequence[UserError]) -> None:
    """Write what plugins did wrong on standard error, if it can be written, with tracebacks of what is no user's error.

    Args:
        failures: of all plugins.
    """
    told = ""
    for failure in failures:
        cause = failure.__cause__
        if cause is not None and not isinstance(cause, UserError):
            told += "".join(traceback.format_exception(cause))
        told += f"mimo: {failure} The run ends as it would have without.\n"
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
        sys.stderr.write(plain_text(told))
        sys.stderr.flush()


def _drawn(draw: Callable[[], None], run: RunInfo) -> list[UserError]:
    try:
        draw()
    except Exception as error:  # noqa: BLE001 -- a full disk, or an image that can't be drawn
        failure = RunError(
            f"pictures of {run.directory}", expected="to be drawn", got=f"{type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return [failure]
    return []
