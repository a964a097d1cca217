"""A file system that fails for a while."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def failing_files(folder: Path, times: int) -> Iterator[list[float]]:
    """Have files of a folder fail to open so many times, as on a disk that fails; yield each wait, which takes no time.

    Args:
        folder: that they lie in, at any depth.
        times: of all of them together.
    """
    failures, waits, opening = iter(range(times)), list[float](), Path.open

    def opened(path: Path, *words: Any, **options: Any) -> Any:
        if path.is_relative_to(folder) and next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opening(path, *words, **options)

    with mock.patch.object(Path, "open", opened), mock.patch.object(time, "sleep", waits.append):
        yield waits
