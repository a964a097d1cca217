"""The ``mimo`` command. Commands import what they need when they run, so that ``mimo --help`` answers at once."""

from __future__ import annotations

import os
import re
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal

from cyclopts import App, CycloptsError

from mimo.hooks import RunError, UserError, plain_text
from mimo.trainer.commands.check import check
from mimo.trainer.commands.checkpoint import make_checkpoint_app
from mimo.trainer.commands.data import make_data_app
from mimo.trainer.commands.evaluate import evaluate
from mimo.trainer.commands.generate import generate
from mimo.trainer.commands.init import init
from mimo.trainer.commands.plugins import models, plugins
from mimo.trainer.commands.profile import profile
from mimo.trainer.commands.simulate import simulate
from mimo.trainer.commands.train import train
from mimo.trainer.config.plain_values import check_words

_REFUSED = 2
_FAILED = 3
_INTERRUPTED = 130
_UNREAD = 141
_PRINTED_SECONDS = 15.0


def main() -> None:
    """Run the command line of this process and exit."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # else Python reports it at exit, when it flushes again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _UNREAD
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are printed on standard error, once."""
    try:
        check_words(words)
        code = make_app()(words, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:  # it has printed what is wrong
        if dashed := [word for word in words if re.match(r"--?\w+(\.\w+)+(=|$)", word)]:
            _print_error(f"mimo: settings are written as key=value, without dashes: {dashed[0].lstrip('-')}")
        return _REFUSED
    except UserError as error:
        _print_error(f"mimo: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- a bug of ours or of a plugin: shown in full, with our exit code
        if isinstance(error, BrokenPipeError) and _is_unread():
            return _UNREAD
        fault = _temporary_fault() if isinstance(error, FileNotFoundError) else None
        _print_error(traceback.format_exc().rstrip() if fault is None else f"mimo: {fault}")
        return _FAILED
    return int(code or 0)


def _temporary_fault() -> RunError | None:
    """Return what is wrong where no temporary file can be written, which torch finds out as it is imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return RunError(
            "TMPDIR",
            expected="a directory in which temporary files can be written",
            got=f"{error.strerror}",
            fix="Free room on the disk, raise the limit of file sizes (`ulimit -f`), or set TMPDIR to a directory of "
            "another disk.",
        )
    return None


def _is_unread() -> bool:
    """Return whether the reader of standard output has closed it, as ``| head`` does."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def make_app() -> App:
    """Return the command with its subcommands."""
    app = App(
        name="mimo",
        help="Train multimodal models in which every module has a parallel grid of its own.",
        version=lambda: version("mimo-trainer"),
        help_flags=["--help", "-h"],
        help_format="plaintext",  # others would take <image> for a tag
        suppress_keyboard_interrupt=False,
    )
    for command in (train, check, simulate, profile, evaluate, generate, plugins, models, init, completion):
        app.command(command)
    app.command(make_checkpoint_app())
    app.command(make_data_app())
    return app


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what completes `mimo` in a shell: `mimo completion bash > ~/.local/share/bash-completion/completions/mimo`.

    Args:
        shell: which.
    """
    print(make_app().generate_completion(prog_name="mimo", shell=shell))


def _print_error(text: str) -> None:
    """Print an error once: under torchrun each process meets the same one, and the first of a machine prints it."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        sys.stderr.write(f"{plain_text(text)}\n")
        sys.stderr.flush()
    else:
        time.sleep(_PRINTED_SECONDS)  # torchrun ends all when the first one exits, so not before the error is out
