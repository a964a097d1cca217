"""Programs in processes of their own, as a shell starts them; whatever they start must be gone when they end.

They are forked from a process that has imported what they will import: this takes a tenth of a second where a fresh
interpreter takes five. Words, folder, environment, streams, session, signals and exit code are those of a program.
Where the start or the end of the interpreter is what is tested, a program is executed.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from runpy import run_path

SECONDS = 200
"""Longest that one command may take."""
COLUMNS = "160"
"""Width that commands print for."""

PRELOAD = ("mimo.testing.garbage", "torch._dynamo", "mimo.testing.processes")
"""Modules that a forked program finds imported, if they are there."""
_REFUSED = 2
_PORTS = range(20_000, 32_000)  # below those that systems choose where a program asks for any
_MARK = "MIMO_TEST_COMMAND"
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_CHUNK = 1 << 16


def free_port() -> int:
    """Return a port to be named before anybody listens there; no system gives it to another process meanwhile."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refused(self, *texts: str) -> bool:
        """Tell whether it was refused before launch: code 2, one line on stderr that begins so and holds the rest."""
        begins, *others = texts
        says_so = self.err.startswith(f"mimo: {begins}") and all(text in self.err for text in others)
        return self.code == _REFUSED and not self.out and self.err.count("\n") == 1 and says_so

    @property
    def printed(self) -> str:
        """What it printed; it must have succeeded without a word on stderr."""
        assert (self.code, self.err) == (0, ""), self
        return self.out


@dataclass(frozen=True, kw_only=True)
class Started:
    """A command that runs, and what it has printed so far, by stream."""

    process: BaseProcess
    mark: str
    out: Connection
    err: Connection
    printed: Mapping[Connection, bytearray]

    @property
    def pid(self) -> int:
        """Process, process group and session."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> Ended:
        """Return how it ended; nothing that it started may be left."""
        deadline = time.monotonic() + SECONDS
        while self._listen(deadline):
            pass
        self.process.join(deadline - time.monotonic())
        assert self.process.exitcode is not None, self._so_far()
        left = self.living()
        assert not left, f"{len(left)} processes were left behind by a command that ended with:\n{self._so_far()}"
        return Ended(
            code=self.process.exitcode, out=self.printed[self.out].decode(), err=self.printed[self.err].decode()
        )

    def wait_for(self, text: str) -> None:
        """Return when the command has printed a line with this text."""
        deadline = time.monotonic() + SECONDS
        while text not in self.printed[self.out].decode(errors="replace").rpartition("\n")[0]:
            assert self._listen(deadline), f"ended without {text!r}: {self._so_far()}"

    def workers(self) -> list[int]:
        """Return the processes that it started, in that order."""
        return sorted(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))

    def living(self) -> list[int]:
        """Return all of its processes: those of its session, and those that inherited its environment.

        Processes that have ended and wait to be reaped show no environment.
        """
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pid, environ = int(path.parent.name), path.read_bytes()
                if environ and (os.getsid(pid) == self.pid or f"{_MARK}={self.mark}\0".encode() in environ):
                    found.append(pid)
        return found

    def _listen(self, deadline: float) -> bool:
        """Read what the command prints next; return False when nobody is left to print anything."""
        pipes = [pipe for pipe in self.printed if not pipe.closed]
        ready = connection.wait(pipes, deadline - time.monotonic()) if pipes else []
        assert ready or not pipes, f"no end after {SECONDS} s: {self._so_far()}"
        for pipe in pipes:
            if pipe in ready:
                chunk = os.read(pipe.fileno(), _CHUNK)
                self.printed[pipe].extend(chunk)
                if not chunk:
                    pipe.close()
        return bool(pipes)

    def _so_far(self) -> str:
        return "\n".join(text.decode(errors="replace") for text in self.printed.values())


def script(path: str, *_words: str) -> None:
    """Be a Python program, which finds its words where such programs do."""
    run_path(path, run_name="__main__")


@contextlib.contextmanager
def start(
    *words: str | Path,
    program: Sequence[str | Path] = (),
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
    call: Callable[..., object] = script,
    preload: Sequence[str] = PRELOAD,
) -> Iterator[Started]:
    """Start a command as the head of a session; end whatever is left of it at the end.

    Args:
        words: of the command line.
        program: what to execute with these words; without one, a process is forked.
        cwd: where it runs; by default where this process does.
        environ: more environment variables.
        path: one more folder to import from.
        call: what a forked process calls with these words. It must be picklable.
        preload: modules that programs of this process find imported; of the first call that forks one.
    """
    mark = uuid.uuid4().hex
    ours = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    ours |= {"OMP_NUM_THREADS": "1", "COLUMNS": COLUMNS, _MARK: mark, **(environ or {})}
    if path is not None:
        ours["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    _ensure_forkserver()
    (out, its_out), (err, its_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    then = (_execute, *map(str, program)) if program else (_call, call, path)
    process = context.Process(target=_begin, args=(its_out, its_err, cwd or Path.cwd(), ours, *then, *map(str, words)))
    with out, err:
        with its_out, its_err:
            process.start()
        started = Started(process=process, mark=mark, out=out, err=err, printed={out: bytearray(), err: bytearray()})
        try:
            yield started
        finally:
            process.kill()
            for pid in started.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.join()


def _ensure_forkserver() -> None:
    """Start what processes are forked from, if none runs: it finds the modules that this process finds.

    Of Python 3.11 it is given no paths, and passes over what it doesn't find.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _begin(
    out: Connection,
    err: Connection,
    cwd: Path,
    environ: Mapping[str, str],
    then: Callable[..., object],
    *given: object,
) -> None:
    """Be what a shell makes of a process before a program runs in it."""
    gc.freeze()  # what is there already is nobody's garbage, and no page of it need be copied to find that out
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests,
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or a shell's &, which has its programs ignore Ctrl-C
    nothing = os.open(os.devnull, os.O_RDONLY)
    with out, err:
        for number, stream in enumerate((nothing, out.fileno(), err.fileno())):
            os.dup2(stream, number)
    os.close(nothing)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    then(*given)


def _execute(*argv: str) -> None:
    os.execv(argv[0], argv)  # noqa: S606  # no shell is wanted


def _call(call: Callable[..., object], path: Path | None, *words: str) -> None:
    sys.argv[1:] = words
    if path is not None:
        sys.path.insert(0, str(path))
    call(*words)
