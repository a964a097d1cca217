"""The main module of the fresh interpreter in which a run from Python is launched: ``python -m`` and a folder."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mimo.hooks import UserError
from mimo.trainer.api.fresh import OUTCOME_FILE, REQUEST_FILE
from mimo.trainer.api.outcome import write_error

_FAILED = 3
_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> int:
    """Do what the request in a folder asks for, leave the outcome there, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the launcher has its own: nothing is to be cleaned up
    request = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    _end_with(request["parent"])
    sys.path[:] = request["path"]
    outcome = folder / OUTCOME_FILE
    try:
        return TASKS[request["task"]](outcome, **request["arguments"])
    except UserError as error:
        write_error(outcome, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 -- a bug of ours or of a plugin: shown in full
        sys.stderr.write(traceback.format_exc())
        return _FAILED


def _train(outcome: Path, settings: Mapping[str, Any]) -> int:
    from functools import partial

    from mimo.trainer.api.entries import train_for
    from mimo.trainer.api.outcome import write_fault
    from mimo.trainer.config.toml import make_settings
    from mimo.trainer.run.start import start_training

    return start_training(
        make_settings(settings), partial(train_for, outcome), on_failure=partial(write_fault, outcome)
    )


def _evaluate(outcome: Path, checkpoint: str, overrides: list[str], answers: Mapping[str, Any]) -> int:
    from functools import partial

    from mimo.trainer.api.entries import evaluate_for
    from mimo.trainer.api.outcome import write_fault
    from mimo.trainer.decoding.answer_settings import AnswerSettings
    from mimo.trainer.run.start import start_evaluation

    entry, on_failure = partial(evaluate_for, outcome), partial(write_fault, outcome)
    return start_evaluation(Path(checkpoint), overrides, AnswerSettings(**answers), entry, on_failure=on_failure)


TASKS: Mapping[str, Callable[..., int]] = {"train": _train, "evaluate": _evaluate}


def _end_with(parent: int) -> None:
    """Have the kernel interrupt this process when the thread that started it is gone, and with it its program."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
