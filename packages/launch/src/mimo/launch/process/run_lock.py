"""The lock on a run directory, so that no two runs write into it; the kernel releases it when its holders end.

It is `flock` on a file that stays there when the run has ended. A lock belongs to what was opened, so whoever has a
copy of the descriptor holds it: the launcher, and rank 0, to which it is passed on. All others close theirs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import fcntl
import json
import os
import socket
import sys
import time
from multiprocessing import reduction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mimo.hooks import ConfigError, parse_json, plain_text

LOCK_FILE = "run.lock"
_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 2.0
_MOST_BYTES = 1 << 12
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})


class RunLock:
    """A run directory that this process holds; make it by `take_lock`.

    It can be handed to a process that is spawned, which then holds it too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def keep(self) -> None:
        """Hold it as rank 0 until this process ends; processes that it starts never do."""
        os.set_inheritable(self._descriptor, False)
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Hold it no longer, in this process alone."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def release(self) -> None:
        """Let others have it, whoever still has a copy of the descriptor: the run has ended."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def __enter__(self) -> Self:
        """Hold it within a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass a copy of the descriptor on to a process that is being spawned."""
        return _received, (reduction.DupFd(self._descriptor),)


def take_lock(directory: Path, *, seconds: float) -> RunLock:
    """Hold a run directory, which is made if it isn't there.

    Args:
        directory: of the run.
        seconds: how long to wait for another run to end.

    Raises:
        ConfigError: naming ``run.directory``: another run holds it, or it can't be made or written.
    """
    begun, said = time.monotonic(), seconds <= _SILENT_SECONDS
    try:
        while (lock := _try(directory)) is None:
            waited = time.monotonic() - begun
            if waited > seconds:
                raise _in_use(directory)
            if not said and waited > _SILENT_SECONDS:
                said = True
                _warn(f"run.directory: waits up to {seconds:g} s for {_whose(directory)}, which holds it")
            time.sleep(_LOOK_SECONDS)
    except OSError as error:
        raise unwritable(directory, error) from error
    return lock


def check_unlocked(directory: Path) -> None:
    """Refuse a directory that a run holds; nothing is made or written.

    Raises:
        ConfigError: naming ``run.directory``.
    """
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):  # no lock, or no name of a folder
        return
    with contextlib.suppress(OSError):  # a file system that has none
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(directory) from None
        finally:
            os.close(descriptor)


def unwritable(directory: Path, error: OSError | ValueError) -> ConfigError:
    """Return the refusal of a run directory that can't be made or written."""
    return ConfigError(
        "run.directory",
        expected="a folder that can be made and written",
        got=f"{str(directory)!r}: {error.strerror if isinstance(error, OSError) else error}",
        fix="Name another one, or look at its disk and permissions.",
    )


def _try(directory: Path) -> RunLock | None:
    """Return the lock of a directory, or None if another run has it."""
    path = directory / LOCK_FILE
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            os.close(descriptor)
            return None
        _warn(
            f"run.directory: expected a file system with locks (flock), got {error.strerror} for {str(path)!r}. The "
            "run goes on; nothing keeps another one out of its directory."
        )
    lock = RunLock(descriptor)
    try:
        if not _is_there(descriptor, path):  # somebody has removed it meanwhile: once more
            lock.close()
            return None
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode() + b"\n"
        os.pwrite(descriptor, text, 0)  # before it is cut, which needs no room on a disk that is full
        os.ftruncate(descriptor, len(text))
    except OSError:
        lock.release()
        raise
    return lock


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _in_use(directory: Path) -> ConfigError:
    return ConfigError(
        "run.directory",
        expected="a folder into which no other run writes",
        got=f"{str(directory)!r}, which is held by {_whose(directory)}",
        fix="Wait for that run to end, or stop it; or name another directory.",
    )


def _whose(directory: Path) -> str:
    """Return who holds a directory, in words."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            table = parse_json(file.read(_MOST_BYTES))
        text = f"process {int(table['pid'])} on {table['host']} since {table['since']}"
        return "".join(letter if letter.isprintable() else "?" for letter in text)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # it has only just been taken
        return "a process that its lock doesn't name"


def _received(copy: Any) -> RunLock:
    return RunLock(copy.detach())


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
        sys.stderr.write(plain_text(f"mimo: {text}\n"))
        sys.stderr.flush()
