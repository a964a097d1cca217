"""Tasks that threads do ahead of their use, in a fixed order, bounded by the bytes of results that nobody has taken.

A thread lives while there is something to do: none is left when all is done, and none waits where the bound is reached.
Whoever takes a result that no thread has begun makes it himself, so that no bound and no order can block him.
"""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import attrs

T = TypeVar("T")
_CLOSING_SECONDS = 5.0
"""How long `Prefetcher.close` waits for tasks that have begun: a read of a dead file system must not keep it."""


class Prefetcher:
    """Does tasks ahead in threads of its own.

    Args:
        workers: threads at most; 0: every task is done by the one who takes its result.
        max_bytes: of finished results that are not taken. Threads begin no task that could exceed it, if its result is
            as large as the largest so far; a single result may be larger.
        on_thread: is called in each thread as it begins.
        name: of the threads.
    """

    def __init__(
        self, *, workers: int, max_bytes: int, on_thread: Callable[[], object] = int, name: str = "prefetcher"
    ) -> None:
        self._queue = _Queue(workers=workers, max_bytes=max_bytes, on_thread=on_thread, name=name)
        weakref.finalize(self, self._queue.close, 0.0)

    def submit(self, run: Callable[[], T], *, order: tuple[int, ...], size: Callable[[T], int]) -> Ticket[T]:
        """Have a task done.

        Args:
            run: the task.
            order: tasks begin in ascending order, equal ones in that of this call.
            size: of the result returns its bytes.
        """
        ticket: Ticket[T] = Ticket(queue=self._queue, task=_Task(run=run, size=size))
        task = ticket._task  # noqa: SLF001 - one module's
        self._queue.add(order, task)
        weakref.finalize(ticket, self._queue.drop, task).atexit = False
        return ticket

    @property
    def held_bytes(self) -> int:
        """Bytes of finished results that nobody has taken."""
        return self._queue.held

    def close(self) -> None:
        """Begin nothing more, and wait some seconds for tasks that run; results can still be taken."""
        self._queue.close(_CLOSING_SECONDS)


@attrs.define(eq=False, kw_only=True)
class _Task:
    run: Callable[[], Any]
    size: Callable[[Any], int]
    state: Literal["waits", "runs", "done"] = "waits"
    result: Any = None
    error: BaseException | None = None
    bytes: int = 0
    is_dropped: bool = False
    """Whether nobody is left who could take the result."""
    is_awaited: bool = False
    """Whether somebody is to be woken when it is done."""


@attrs.frozen(eq=False, kw_only=True)
class Ticket(Generic[T]):
    """The result of a task, to be taken once."""

    _queue: _Queue
    _task: _Task

    @property
    def is_done(self) -> bool:
        """Whether `take` returns at once."""
        return self._task.state == "done"

    def wait(self) -> BaseException | None:
        """Return what the task has raised, None for nothing, when it is done; the result is still to be taken."""
        if self._queue.claim(self._task):
            self._queue.do(self._task)
        self._queue.wait(self._task)
        return self._task.error

    def take(self) -> T:
        """Return the result when it is there; a task that no thread has begun is done here.

        Raises:
            BaseException: what the task has raised.
        """
        task = self._task
        self.wait()
        self._queue.release(task)
        try:
            if task.error is not None:
                raise task.error
            return task.result  # type: ignore[no-any-return]  # of the task that made this ticket
        finally:
            task.result = task.error = None


class _Queue:
    """What a prefetcher shares with its threads: they don't hold the prefetcher, which therefore can be collected."""

    def __init__(self, *, workers: int, max_bytes: int, on_thread: Callable[[], object], name: str) -> None:
        self.held = 0
        self._workers = workers
        self._max_bytes = max_bytes
        self._on_thread = on_thread
        self._name = name
        self._changed = threading.Condition(threading.RLock())  # a collection, and so `close`, may begin inside
        self._waiting: list[tuple[tuple[int, ...], int, _Task]] = []
        self._added = 0
        self._running = 0
        self._largest = 0
        self._active = 0
        self._threads: set[threading.Thread] = set()
        """Those that are active, and those that end."""
        self._is_closed = False

    def add(self, order: tuple[int, ...], task: _Task) -> None:
        with self._changed:
            if self._workers and not self._is_closed:
                self._added += 1
                heapq.heappush(self._waiting, (order, self._added, task))
                self._hire()

    def claim(self, task: _Task) -> bool:
        """Return whether it is for the caller to do a task."""
        with self._changed:
            if task.state != "waits":
                return False
            task.state = "runs"
            return True

    def do(self, task: _Task) -> None:
        try:
            task.result = task.run()
            task.bytes = task.size(task.result)
        except BaseException as error:  # noqa: BLE001 - raised where it is taken
            task.error = error
        with self._changed:
            task.run = task.size = _nothing
            task.state = "done"
            if task.is_dropped:
                task.result, task.bytes = None, 0
            self.held += task.bytes
            self._largest = max(self._largest, task.bytes)
            if task.is_awaited:
                self._changed.notify_all()

    def wait(self, task: _Task) -> None:
        with self._changed:
            task.is_awaited = True
            while task.state != "done":
                self._changed.wait()

    def release(self, task: _Task) -> None:
        """Count the result of a task as taken."""
        with self._changed:
            self.held -= task.bytes
            task.bytes = 0
            self._hire()

    def drop(self, task: _Task) -> None:
        """Let go of a task whose ticket nobody has any more: it is not begun, or its result counts as taken."""
        with self._changed:
            task.is_dropped = True
            if task.state == "waits":
                task.state, task.run, task.size = "done", _nothing, _nothing
            elif task.state == "done":
                self.release(task)

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _hire(self) -> None:
        """Start a thread if there is work for one more; each that begins some starts the next."""
        if self._active < self._workers and self._may_begin():
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads are to be had: those that take do the work
                return
            self._active += 1
            self._threads = {thread, *(other for other in self._threads if other.is_alive())}

    def _may_begin(self) -> bool:
        while self._waiting and self._waiting[0][2].state != "waits":
            heapq.heappop(self._waiting)
        if not self._waiting:
            return False
        return not (self.held or self._running) or self.held + (self._running + 1) * self._largest <= self._max_bytes

    def _work(self) -> None:
        self._on_thread()
        while (task := self._next()) is not None:
            self.do(task)
            with self._changed:
                self._running -= 1
            del task

    def _next(self) -> _Task | None:
        with self._changed:
            if not self._may_begin():
                self._active -= 1
                return None
            _, _, task = heapq.heappop(self._waiting)
            task.state = "runs"
            self._running += 1
            self._hire()
            return task


def _nothing(*_: Any) -> Any:
    """Stand in the place of a task's functions once it is done, so that what they hold is let go."""
