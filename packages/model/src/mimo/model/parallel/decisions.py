"""What a forward decides once: where it is computed again for a backward, it takes what it decided the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Decisions:
    """What one forward decides, in order: nothing of it is part of a graph."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._is_complete = False

    @contextmanager
    def at(self) -> Iterator[None]:
        """Have `decided` keep what is decided within; from the second time on, have it return that again."""
        again = iter(self._values) if self._is_complete else None
        token = _now.set((self._values, again))
        try:
            yield
        finally:
            _now.reset(token)
            self._is_complete = True


_now: ContextVar[tuple[list[Any], Iterator[Any] | None] | None] = ContextVar("_now", default=None)


def decided(decide: Callable[[], T]) -> T:
    """Return what ``decide`` returns, or where a forward is computed again what it returned in the first one."""
    if (now := _now.get()) is None:
        return decide()
    values, again = now
    if again is not None:
        return cast("T", next(again))
    values.append(decide())
    return cast("T", values[-1])
