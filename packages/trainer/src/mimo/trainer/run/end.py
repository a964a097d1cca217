"""The end of a run: failures of lifecycle plugins are reported once, and change no exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from mimo.hooks import Lifecycle, RunInfo, UserError, plain_text
from mimo.topology.collectives import all_gather_json

_PICTURES = "mimo_logger_pictures"
"""The plugin that draws."""


def end_run(plugins: Lifecycle, run: RunInfo, *, group: dist.ProcessGroup | None = None) -> None:
    """Call `mimo_run_end` of all plugins, and report what failed, once; collective.

    Everything is trained and saved by then.

    Args:
        plugins: all of this rank.
        run: which ends.
        group: in which all ranks meet; None for the default group.
    """
    if run.rank == 0 and importlib.util.find_spec(_PICTURES) is None:
        with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
            print(f"{run.name}: no pictures are drawn, as {_PICTURES.replace('_', '-')} is not installed")
    failures = plugins.run_end(run)
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
