"""Reads of a file system that fails for a moment are tried again; a file that is broken or missing is not."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_FAILING = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EREMOTEIO),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
PAUSES = (0.1, 0.5, 2.0)
"""Seconds before each further attempt."""


def is_read_failure(error: BaseException) -> bool:
    """Return whether an error is one of the file system, or of the network behind it, and says nothing of the file."""
    return isinstance(error, OSError) and error.errno in _FAILING


def retried(read: Callable[[], T], *, pauses: Sequence[float] = PAUSES) -> T:
    """Return what is read, after as many further attempts as there are pauses.

    Args:
        read: may be called again.
        pauses: seconds before each of them.

    Raises:
        OSError: the file system failed each time.
        Exception: any other error of ``read``, at once.
    """
    for pause in pauses:
        try:
            return read()
        except OSError as error:
            if not is_read_failure(error):
                raise
        time.sleep(pause)
    return read()
