"""Running something in a fresh interpreter, on whose main thread, and out of whose clean state, a run can be launched.

The calling program may have used torch, whose threads don't survive a fork; may be a notebook, which has no main file;
or may call from a thread, where signals can't be handled. None of this matters to a process that begins anew. It gets
plain data, and what it prints appears where the caller prints.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mimo.trainer.api.outcome import read_outcome

REQUEST_FILE = "request.json"
OUTCOME_FILE = "outcome.json"
_CHILD = "mimo.trainer.api.child"
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_READ_BYTES = 1 << 16


def run_fresh(task: str, arguments: Mapping[str, Any], *, what: str) -> Any:
    """Return what a task returns that runs in a fresh interpreter; nothing of it is left when this returns or raises.

    Args:
        task: its name, see `mimo.trainer.api.child`.
        arguments: of it, plain data.
        what: names the run in errors.

    Raises:
        UserError: the run was refused, or one of its ranks failed.
        KeyboardInterrupt: this program was interrupted, or the run alone.
    """
    # A rank whose launcher was killed may write its fault there while it is removed.
    with _stops_passed_on() as running, tempfile.TemporaryDirectory(prefix="mimo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        path = [entry for entry in sys.path if isinstance(entry, str)]  # imports pass over anything else
        request = {"task": task, "arguments": arguments, "path": path, "parent": os.getpid()}
        (folder / REQUEST_FILE).write_text(json.dumps(request), encoding="utf-8")
        code = _run([sys.executable, "-P", "-m", _CHILD, str(folder)], running)
        return read_outcome(folder / OUTCOME_FILE, code, what=what)


@contextlib.contextmanager
def _stops_passed_on() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have what would end this program ask the processes in the list to save and end, and then end it.

    A program that has handlers of its own keeps them; in a thread there can be none.
    """
    running: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if not running:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        asked.append(number)
        for process in running:
            process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    signals = [signal.SIGTERM, signal.SIGHUP] if is_main else []
    own = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in own:
        signal.signal(number, pass_on)
    try:
        yield running
    finally:
        for number in own:
            signal.signal(number, signal.SIG_DFL)
        if asked:
            signal.raise_signal(asked[0])


def _run(command: list[str], running: list[subprocess.Popen[bytes]]) -> int:
    """Run a command and return its exit code; its output goes where this program's own goes now."""
    own = (sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)
    out, err = (None if is_own else subprocess.PIPE for is_own in own)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()  # else what the caller has printed may come after what the run prints
    process = subprocess.Popen(  # noqa: S603 -- our own module
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    )
    running.append(process)
    try:
        _copy_output(process, [(process.stdout, sys.stdout), (process.stderr, sys.stderr)])
        return process.wait()
    finally:
        _end(process)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _copy_output(process: subprocess.Popen[bytes], streams: list[tuple[IO[bytes] | None, Any]]) -> None:
    """Write what a process prints to where the caller prints: a notebook's cell, or a stream that replaces its own."""
    with selectors.DefaultSelector() as selector:
        for source, target in streams:
            if source is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(source, selectors.EVENT_READ, (decoder, target))
        while selector.get_map():
            ready = selector.select(timeout=_LOOK_SECONDS)
            if not ready and process.poll() is not None:
                return  # somebody whom a plugin started may hold the pipes open
            for key, _ in ready:
                decoder, target = key.data
                data = os.read(key.fd, _READ_BYTES)
                if target is not None:  # as within redirect_stdout(None)
                    target.write(decoder.decode(data, final=not data))
                    target.flush()
                if not data:
                    selector.unregister(key.fileobj)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all ranks with it: its launcher ends them on an interrupt."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second interrupt leaves nobody behind either: ranks end when their launcher is gone
        process.kill()
        process.wait()
