"""Commands whose processes are killed at a chosen moment.

A blow is dealt inside the rank that it meets, by patches of names that any save, load or step passes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import attrs
from commands import be_mimo, start

from mimo.launch import Heartbeat
from mimo.testing import Ended


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


def command(words: Sequence[str | Path], blow: Blow | None = None) -> Ended:
    """Run ``mimo`` with these words, and return how it ended; negative codes are signals.

    Args:
        words: of the command line.
        blow: what becomes of it.
    """
    with start(*words, call=be_mimo if blow is None else partial(_be_struck, blow)) as started:
        return started.wait()


def _be_struck(blow: Blow, *words: str) -> NoReturn:
    _prepare(blow)
    be_mimo(*words)


def _prepare(blow: Blow) -> None:
    """Patch what the rank will call; it inherits this."""
    from mimo.launch.start import worker as _worker

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
            enter, begin = Heartbeat.enter, _before(lambda: None, _timer(blow).start, blow)

            def enter_struck(heartbeat: Heartbeat, doing: str) -> None:
                enter(heartbeat, doing)
                if doing == "loading":
                    begin()

            setattr(Heartbeat, "enter", enter_struck)  # noqa: B010  # mypy refuses to assign a method


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
