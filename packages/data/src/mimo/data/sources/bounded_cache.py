"""What was read lately, bounded by bytes: for records and for what sources decode many of at once."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Values by key, of which the least recently used are forgotten.

    Threads may use it at once, and so may a forked process, which begins with an empty one. A value that is larger than
    the bound alone is made each time.

    Args:
        max_bytes: of all values that are kept.
        size: of a value in bytes.
    """

    def __init__(self, max_bytes: int, size: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size = size
        self._begin()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, made if it isn't there. What ``make`` raises is passed on and not remembered."""
        if self._process != os.getpid():  # a lock that another thread held as the process was forked is never freed
            self._begin()
        with self._lock:
            if key in self._values:
                return self._used(key)
            making = self._making.setdefault(key, Lock())
        with making:  # threads that need the same value wait for the first of them
            with self._lock:
                if key in self._values:
                    return self._used(key)
            try:
                value = make()
                self._keep(key, value, self._size(value))
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return value

    def _used(self, key: Hashable) -> T:
        self._values.move_to_end(key)
        return self._values[key][0]

    def _keep(self, key: Hashable, value: T, size: int) -> None:
        with self._lock:
            if size <= self._max_bytes and key not in self._values:
                self._values[key] = value, size
                self._bytes += size
            while self._bytes > self._max_bytes:
                _, (_, freed) = self._values.popitem(last=False)
                self._bytes -= freed

    def _begin(self) -> None:
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._bytes = 0
        self._lock = Lock()
        self._process = os.getpid()
