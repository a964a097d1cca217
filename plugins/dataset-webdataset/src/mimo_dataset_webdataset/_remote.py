"""Shards that lie elsewhere, by fsspec: what is known of one, and all of its bytes; with retries, and never forever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import attrs

from mimo.hooks import ConfigError, DataError, RunError
from mimo_dataset_webdataset._known import Facts
from mimo_dataset_webdataset._shards import Shard

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

R = TypeVar("R")
WAITS = (0.25, 1.0, 4.0)
"""Seconds before each further attempt."""
_CHUNK = 1 << 20
_MIN_RATE = 1 << 14
"""Bytes a second below which a shard is given up, counted from its beginning."""
_MARKS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "mtime", "LastModified", "last_modified", "Last-Modified")
"""What file systems call that which changes with a file."""


@attrs.frozen(kw_only=True)
class Remote:
    """How shards are read from elsewhere.

    Args:
        timeout: seconds without an answer or a byte after which an attempt has failed; of HTTP, others have their own.
        waits: seconds before each further attempt.
    """

    timeout: float
    waits: Sequence[float] = WAITS

    def facts(self, shard: Shard) -> Facts:
        """Return the size and mark of a shard.

        Raises:
            ConfigError: what opens such addresses isn't installed.
            DataError: it can't be found.
            RunError: it can't be reached.
        """

        def ask() -> Facts:
            system, path = self._system(shard)
            info = system.info(path)
            if not isinstance(info.get("size"), int):
                msg = "an answer without its size"
                raise OSError(msg)
            return Facts(size=info["size"], mark=next((str(info[key]) for key in _MARKS if info.get(key)), ""))

        return self._retried(ask, shard)

    def download(self, shard: Shard, size: int, file: BinaryIO) -> None:
        """Write the bytes of a shard into a file.

        Raises:
            ConfigError: as `facts`.
            DataError: it can't be found.
            RunError: it can't be read, or isn't of that size.
        """
        self._retried(lambda: self._copy(shard, size, file), shard)

    def _copy(self, shard: Shard, size: int, file: BinaryIO) -> None:
        system, path = self._system(shard)
        # By HTTP in one answer: not every server gives ranges.
        options: Mapping[str, Any] = {"block_size": 0} if _is_http(shard) else {}
        file.seek(0)
        end, done = time.monotonic() + self.timeout + size / _MIN_RATE, 0
        with system.open(path, "rb", **options) as source:
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > size:
                    msg = f"more than the {size:,} bytes that were announced"
                    raise OSError(msg)
                if time.monotonic() > end:
                    msg = f"{done:,} of {size:,} bytes in {self.timeout + size / _MIN_RATE:.0f} seconds"
                    raise TimeoutError(msg)
                file.write(chunk)
        if done != size:
            msg = f"{done:,} bytes instead of the {size:,} that were announced"
            raise OSError(msg)
        file.flush()

    def _system(self, shard: Shard) -> tuple[AbstractFileSystem, str]:
        # Made anew each time, which costs microseconds: fsspec caches them for one process, and makes other ones for
        # those that it forks, as the threads behind some don't live there.
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {}
        try:
            if _is_http(shard):
                import aiohttp

                seconds = aiohttp.ClientTimeout(total=None, connect=self.timeout, sock_read=self.timeout)
                options["client_kwargs"] = {"timeout": seconds}
            system, path = url_to_fs(shard.address, **options)
        except (ImportError, ValueError) as error:  # also: a protocol that nobody knows
            extra = 'pip install "mimo-dataset-webdataset[http]"' if _is_http(shard) else "its package of fsspec"
            raise ConfigError(
                "data.path",
                expected="an address whose protocol can be opened here",
                got=f"{shard.identity!r} ({error})",
                fix=f"Install {extra}." if isinstance(error, ImportError) else "",
            ) from error
        return system, path

    def _retried(self, action: Callable[[], R], shard: Shard) -> R:
        for wait in (*self.waits, None):
            try:
                return action()
            except ConfigError:
                raise
            except Exception as error:  # each file system has errors of its own
                if wait is None or isinstance(error, PermissionError):
                    # What is missing or forbidden is wrong with the data; all else with the way to it.
                    is_data = isinstance(error, PermissionError) or _is_missing(error)
                    said = (str(error) or type(error).__name__).replace(shard.address, shard.identity)
                    raise (DataError if is_data else RunError)(
                        shard.identity,
                        expected="a shard that can be read",
                        got=f"{said} ({len(self.waits) + 1} attempts)",
                    ) from error
                time.sleep(wait)
        raise AssertionError


def _is_missing(error: Exception) -> bool:
    """Return whether a file isn't there. fsspec says so of all that goes wrong by HTTP: the cause says what did."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status in range(400, 500) and status not in (408, 429)  # too slow, too many
    unreached = type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError)
    return isinstance(error, FileNotFoundError) and not unreached


def _is_http(shard: Shard) -> bool:
    return shard.address.lower().startswith(("http://", "https://"))
