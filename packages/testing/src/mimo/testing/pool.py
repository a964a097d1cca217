"""A process that stays as it was forked, and forks the ranks of every run of functions that can be pickled.

A process that has been a rank can't be one of another group: DTensor keeps what it worked out by mesh, and with it the
names of groups that are gone, which new groups get again. And one that has computed can't be forked at will. So this
one computes nothing; it imports whatever its ranks have imported, so that those of the next run need not.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mimo.testing.once import made_once
from mimo.testing.ranks import answers_of, import_all, results_of

_ENDS_SECONDS = 5
_FORK = multiprocessing.get_context("fork")


def _serve(parent: Connection, ours: Connection, prepare: Callable[[], object], ahead: Callable[..., object]) -> None:
    """Do one run after the other, until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends us
    ours.close()  # else we would not see that it closes it
    import_all()
    prepare()
    with suppress(EOFError, ConnectionError):  # the parent has closed its end
        while True:
            world, task = parent.recv()
            parent.send_bytes(pickle.dumps(_run(world, task, parent, ahead)))


def _run(world: int, task: bytes, parent: Connection, ahead: Callable[..., object]) -> dict[int, tuple[bool, Any]]:
    """Return the answers of a run by rank; results are pickled."""
    try:
        function, args = pickle.loads(task)  # noqa: S301  # from our own parent
        ahead(*args)
    except Exception:  # noqa: BLE001  # whatever it is, the parent shows it
        return dict.fromkeys(range(world), (False, traceback.format_exc()))
    answers = answers_of(world, _result_and_imports, (parent, function, args), stop=[parent])
    for rank, (fine, answer) in answers.items():
        if fine:
            result, imported = answer
            answers[rank] = (True, result)
            for name in imported:
                with suppress(ImportError):  # not a module that can be imported by itself
                    importlib.import_module(name)
    return answers


def _result_and_imports(rank: int, parent: Connection, function: Callable[..., object], args: Any) -> Any:
    """Return the pickled result of one rank, and the modules that it had to import."""
    parent.close()  # so that it shows the end of the process that forked us, not of ours
    known = set(sys.modules)
    result = function(rank, *args)
    return pickle.dumps(result), [name for name in sys.modules if name not in known]


class Pool:
    """Runs functions in several processes that form a gloo group, as `ranks.fork_ranks` does.

    Make it in a process that has imported torch and computed nothing. It may compute afterwards.

    Args:
        prepare: what every rank would have to do, done once before any is forked. It must not compute.
        folder: where `recall` keeps results for all processes that have a pool with it; without, each has its own.
        ahead: called with the arguments of a run before its ranks are forked, as ``prepare`` is before those of any.
    """

    def __init__(
        self,
        prepare: Callable[[], object] = lambda: None,
        folder: Path | None = None,
        *,
        ahead: Callable[..., object] = lambda *_args: None,
    ) -> None:
        self._prepare, self._folder, self._ahead = prepare, folder, ahead
        self._process, self._pipe = self._start()
        self._known: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        """End what it runs."""
        self.close()

    def run(self, world: int, function: Callable[..., object], *args: object) -> list[Any]:
        """Run ``function(rank, *args)`` in ``world`` processes that form a gloo group; return their results by rank.

        Args:
            world: number of processes.
            function: of a module, so that it can be pickled by its name.
            args: picklable too.

        Raises:
            RanksError: with the traceback of every rank that failed. The others have been ended.
        """
        task = pickle.dumps((function, args))
        if self._pipe.closed:
            self._process, self._pipe = self._start()
        try:
            self._pipe.send((world, task))
            answers = pickle.loads(self._pipe.recv_bytes())  # noqa: S301  # from our own child
        except (EOFError, ConnectionError):
            self.close()  # and start anew with the next run
            answers = dict.fromkeys(range(world), (False, "who forked it is gone"))
        except BaseException:
            self.close()
            raise
        return [pickle.loads(result) for result in results_of(answers, world)]  # noqa: S301  # of our own ranks

    def recall(self, world: int, function: Callable[..., object], *args: object) -> list[Any]:
        """Do as `run`, but once for all who ask for the same: what several tests compare with.

        Args:
            world: number of processes.
            function: leaves nothing behind.
            args: equal where their `repr` is.
        """
        key = repr((world, function.__module__, function.__qualname__, args))
        if key not in self._known:
            run = partial(self.run, world, function, *args)
            if self._folder is None:
                self._known[key] = run()
            else:
                path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.pickle"
                made_once(path, lambda part: part.write_bytes(pickle.dumps(run())))
                self._known[key] = pickle.loads(path.read_bytes())  # noqa: S301  # of our own ranks
        return self._known[key]

    def close(self) -> None:
        """End what it runs."""
        self._pipe.close()
        self._process.join(_ENDS_SECONDS)
        self._process.kill()
        self._process.join()

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(theirs, ours, self._prepare, self._ahead), name="forks ranks")
        process.start()
        theirs.close()
        return process, ours
