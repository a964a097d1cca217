"""Chat templates are programs that somebody else wrote: they run in a child process, with limits on time and memory."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing.util
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import parse_json

_PROGRAM = Path(__file__).with_name("render_worker.py")
_CHUNK = 1 << 16
_START = 20.0
"""Seconds that a busy machine may take to start a process."""


class RenderError(ValueError):
    """A template that can't be compiled, fails, or takes more than it may."""


class RenderLimitError(RenderError):
    """A template that takes more than it may, or can't be compiled: no other conversation is worth the try."""


@attrs.frozen(kw_only=True)
class Rendered:
    """The text of a conversation.

    Args:
        pieces: of the text, and of each whether the template marks it as what the model is to write.
        firsts: for each number of first messages that was asked for, the letters that the template writes for these
            alone; None where it doesn't write them as it does ahead of the others.
    """

    pieces: tuple[tuple[str, bool], ...]
    firsts: tuple[int | None, ...] = ()

    @property
    def text(self) -> str:
        """The text."""
        return "".join(text for text, _ in self.pieces)


@attrs.frozen(kw_only=True)
class Limits:
    """What one conversation may take.

    Args:
        seconds: for all of its renderings.
        memory: bytes of the child's address space.
        answer: bytes of the answer.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    answer: int = 1 << 28


@attrs.define(kw_only=True)
class _Child:
    process: subprocess.Popen[bytes]
    owner: int
    """The process that started it: one that was forked from that starts its own."""


class Renderer:
    """One template, compiled in a child process that starts at the first question and ends with this object.

    Args:
        source: the template, in Jinja's language.
        limits: of a question; a child that exceeds them is killed, and the next question starts another.
    """

    def __init__(self, source: str, limits: Limits | None = None) -> None:
        self._source = source
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, variables: Mapping[str, Any], firsts: Sequence[tuple[int, bool]] = ()) -> Rendered:
        """Return the text that the template writes.

        Args:
            variables: what it is given.
            firsts: numbers of first messages, each with or without what asks for an answer, for `Rendered.firsts`.

        Raises:
            RenderError: the template can't be compiled, it fails, or it takes too long or too much.
        """
        with self._lock:
            try:
                process = self._started()
                question = {"variables": variables, "firsts": firsts}
                answer = self._ask(process, question, seconds=self._limits.seconds)
            except BaseException:
                self._end()
                raise
        if "error" in answer:
            raise RenderError(answer["error"])
        pieces = tuple((text, generated) for text, generated in answer["pieces"])
        return Rendered(pieces=pieces, firsts=tuple(answer["firsts"]))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.owner == os.getpid():
            return self._child.process
        words = [sys.executable, "-P", str(_PROGRAM)]
        process = subprocess.Popen(  # noqa: S603  # our own program
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._child = _Child(process=process, owner=os.getpid())
        # Not weakref's: processes of multiprocessing, as ranks are, run these alone when they end.
        multiprocessing.util.Finalize(self, _kill, (process, os.getpid()), exitpriority=0)
        limits = {"bytes": self._limits.memory, "seconds": 2 + math.ceil(self._limits.seconds)}
        answer = self._ask(process, {"source": self._source, **limits}, seconds=_START + self._limits.seconds)
        if answer:
            msg = f"it can't be compiled: {answer['error']}"
            raise RenderLimitError(msg)
        return process

    def _ask(self, process: subprocess.Popen[bytes], question: Any, *, seconds: float) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            rest = memoryview(f"{json.dumps(question)}\n".encode())
        except RecursionError:
            msg = "it nests too deeply"
            raise RenderError(msg) from None
        answer = bytearray()
        writes, reads = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(writes, False)
        deadline = time.monotonic() + seconds
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            poll = select.poll()  # not `select`, which takes no numbers of files above 1,023
            poll.register(reads, select.POLLIN)
            if rest:
                poll.register(writes, select.POLLOUT)
            ready = {number for number, _ in poll.poll(1000 * left)} if left > 0 else set()
            if not ready:
                msg = f"it takes longer than {seconds:g} s"
                raise RenderLimitError(msg)
            if writes in ready:
                with contextlib.suppress(BrokenPipeError):  # its end is read below
                    rest = rest[os.write(writes, rest[:_CHUNK]) :]
            if reads in ready:
                read = os.read(reads, _CHUNK)
                if not read:
                    raise RenderLimitError(self._death(process))
                answer += read
            if len(answer) > self._limits.answer:
                msg = f"its text is longer than {self._limits.answer:,} bytes"
                raise RenderLimitError(msg)
        return parse_json(bytes(answer))

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}, as where it needs more than {self._limits.memory >> 20} MiB"

    def _end(self) -> None:
        if self._child is not None and self._child.owner == os.getpid():
            _kill(self._child.process, os.getpid())
        self._child = None


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
