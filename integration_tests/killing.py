"""Commands whose processes are killed at a chosen moment, forked so that a start takes no imports.

A blow is dealt inside the rank that it meets, by patches of names that any save, load or step passes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

_PRELOADED = ["mimo.trainer._train", "mimo.trainer._tasks", "mimo.trainer._cli", "torch._dynamo", "killing"]
_SECONDS = 150


@attrs.frozen(kw_only=True)
class Blow:
    """A SIGKILL of one rank, or of all processes of a command as when a machine goes off.

    Args:
        when: at a call that writes: a sync or rename of a file; a time after the rank began; or after it began to load.
        rank: which rank meets it.
        number: of the call, from 1.
        seconds: the time.
        everybody: whether all processes are killed.
    """

    when: Literal["write", "time", "load"]
    rank: int
    number: int = 1
    seconds: float = 0.0
    everybody: bool = False


def command(words: Sequence[str | Path], log: Path, blow: Blow | None = None) -> int:
    """Run ``mimo`` with these words, and return its exit code; negative codes are signals.

    Args:
        words: of the command line.
        log: file for all that it prints.
        blow: what becomes of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_be_command, args=(list(map(str, words)), log, blow))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        raise AssertionError(f"no end after {_SECONDS} s: {blow}\n{log.read_text()}")
    assert process.exitcode is not None
    return process.exitcode


def _be_command(words: Sequence[str], log: Path, blow: Blow | None) -> None:
    from mimo.trainer._cli import run

    os.setpgid(0, 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    if blow is not None:
        _prepare(blow)
    sys.exit(run(words))


def _prepare(blow: Blow) -> None:
    """Patch what the rank will call; it inherits this."""
    from mimo.trainer import _train, _worker

    match blow.when:
        case "write":
            calls = itertools.count(1)

            def count() -> None:
                if next(calls) == blow.number:
                    _strike(blow)

            for name in ("fsync", "rename", "replace"):
                setattr(os, name, _before(getattr(os, name), count, blow))
        case "time":
            vars(_worker)["_prepare"] = _before(vars(_worker)["_prepare"], _timer(blow).start, blow)
        case "load":
            vars(_train)["resume"] = _before(vars(_train)["resume"], _timer(blow).start, blow)


def _before(function: Callable[..., Any], do: Callable[[], object], blow: Blow) -> Callable[..., Any]:
    """Return a function that does something before, in the rank that is met."""

    def call(*args: Any, **named: Any) -> Any:
        if multiprocessing.current_process().name == f"rank {blow.rank}":
            do()
        return function(*args, **named)

    return call


def _timer(blow: Blow) -> threading.Timer:
    return threading.Timer(blow.seconds, _strike, [blow])


def _strike(blow: Blow) -> None:
    if blow.everybody:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
