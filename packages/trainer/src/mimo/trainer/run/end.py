"""The end of a run: failures of lifecycle plugins and pictures are reported once, and change no exit code."""

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

    Everything is trained and saved by then.

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
    """Write plugins' failures to standard error, if it can be written, with tracebacks unless they are user errors.

    Args:
        failures: of all plugins.
    """
    text = ""
    for failure in failures:
        cause = failure.__cause__
        if cause is not None and not isinstance(cause, UserError):
            text += "".join(traceback.format_exception(cause))
        text += f"mimo: {failure} The run ends as it would have without.\n"
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
        sys.stderr.write(plain_text(text))
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
