"""Lifecycle plugin ``console``: progress on the terminal, as a line that renews itself, or as plain lines in a file."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from mimo.hooks import EvaluationInfo, RunError, RunInfo, StepInfo, UserError, hookimpl, plain_text


class Progress:
    """Prints on rank 0, where all values are known as on every rank.

    Args:
        console: where to; by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._begun = 0.0
        self._step = 0
        self._pending = False
        self._told_of_cuts = False
        self._told_of_drops = False

    @hookimpl
    def mimo_run_begin(self, run: RunInfo) -> None:
        """Say what begins."""
        self._begun, self._step = time.monotonic(), run.first_step - 1
        if _prints(run):
            self._line(f"{run.name}: {_span(run)} with {run.world} processes, in {run.directory}")
            if run.loaded:
                self._line(f"{run.name}: {run.loaded}")

    @hookimpl
    def mimo_step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Show the step; on a terminal each one, as a line every ``logging.interval`` steps."""
        self._step = info.step
        if not _prints(run):
            return
        if info.truncated and not self._told_of_cuts:
            self._told_of_cuts = True
            self._line(f"{run.name}: data.max_tokens cuts samples, {info.truncated} in step {info.step}")
        if info.dropped and not self._told_of_drops:
            self._told_of_drops = True
            self._line(f"{run.name}: data.longer drops samples, {info.dropped} in step {info.step}")
        due = info.step % run.config["logging"]["interval"] == 0 or info.step == run.steps
        text = self._describe(run, info)
        if due:
            self._line(text)
        elif self._console.is_terminal:
            with self._terminal():
                self._wipe()
                self._console.print(text, end="", markup=False, no_wrap=True, overflow="ellipsis")
            self._pending = True

    @hookimpl
    def mimo_evaluated(self, run: RunInfo, info: EvaluationInfo) -> None:
        """Show the result."""
        if _prints(run):
            self._line(show_evaluation(info))

    @hookimpl
    def mimo_save_failed(self, run: RunInfo, step: int, error: UserError) -> None:
        """Say why, and that the run goes on."""
        if _prints(run):
            self._line(f"checkpoint not saved, going on after step {step}: {error}")

    @hookimpl
    def mimo_run_end(self, run: RunInfo) -> None:
        """Say how long it took, and if it ends before its last step, as it was asked to, how it goes on."""
        if not _prints(run):
            return
        took = show_seconds(time.monotonic() - self._begun)
        if self._step < run.steps:
            self._line(
                f"{run.name}: stopped as asked, step {self._step} of {run.steps} is saved, in {took}; "
                "checkpoint.load=latest continues"
            )
        else:
            self._line(f"{run.name}: done in {took}, step {run.steps} is saved in {run.directory}")

    def _describe(self, run: RunInfo, info: StepInfo) -> str:
        done = info.step - run.first_step + 1
        left = (time.monotonic() - self._begun) / done * (run.steps - info.step)
        width = len(str(run.steps))
        losses = "".join(f"{name} {loss:.4f}  " for name, loss in info.losses.items())
        text = (
            f"step {info.step:>{width}}/{run.steps}  loss {info.loss:7.4f}  {losses}"
            f"{info.tokens_per_second:8,.0f} tokens/s  {show_seconds(left)} left  "
            f"data {info.data_seconds:.2f} s"
        )
        if not info.skipped:
            return text
        nothing = not info.label_tokens and math.isfinite(info.loss)
        return f"{text}  (skipped{', as no token is learned' if nothing else ''})"

    def _line(self, text: str) -> None:
        with self._terminal():
            self._wipe()
            self._console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        """Write on into nothing when the terminal has been closed: the run still has to be saved."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._console.file.fileno())
            os.close(nothing)

    def _wipe(self) -> None:
        """Clear the line that renews itself; the next text takes its place."""
        if self._pending:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._pending = False


def show_seconds(seconds: float) -> str:
    """Return a time as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_evaluation(info: EvaluationInfo) -> str:
    """Return the result of an evaluation as one line."""
    losses = "".join(f", {name} {loss:.4f}" for name, loss in info.losses.items())
    answers = ", ".join(f"{name} {score:.4f}" for name, score in info.answers.items())
    return (
        f"evaluation at step {info.step}: loss {info.loss:.4f}{losses}, "
        f"{info.exact_match:.1%} of {info.samples} samples exactly right" + (f", answers {answers}" if answers else "")
    )


def show_text(piece: str) -> None:
    """Print a piece of what is written, so that it is seen at once; end as other tools do if nobody reads on.

    Raises:
        RunError: it can't be written, or not these letters.
    """
    try:
        print(plain_text(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    except BrokenPipeError:  # as after `| head`; the launcher ends the other ranks without a word
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    except (OSError, UnicodeEncodeError) as error:
        raise RunError("standard output", expected="to be read to the end", got=str(error)) from error


def _span(run: RunInfo) -> str:
    if run.first_step > run.steps:
        return f"nothing left to train, step {run.first_step - 1} of {run.steps} was loaded,"
    if run.first_step > 1:
        return f"step {run.first_step} to {run.steps}"
    if run.config["checkpoint"]["load"] == "latest" and not run.loaded:
        return f"no checkpoint yet, so all {run.steps} steps"
    return f"{run.steps} steps"


def _prints(run: RunInfo) -> bool:
    return run.rank == 0 and bool(run.config["logging"]["console"])
