"""A bounded folder of shards fetched from elsewhere, which any number of processes share.

One lock file a shard: who reads a shard shares it, who fetches or removes one has it alone. A shard that is being
fetched lies under another name in its full length, so that it counts. Nobody who waits for room holds any.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import attrs

from mimo.data import digest_of_text, is_read_failure
from mimo.hooks import ConfigError, DataError
from mimo_dataset_webdataset._known import REINDEX, Facts
from mimo_dataset_webdataset._remote import Remote
from mimo_dataset_webdataset._shards import Shard

_LONGEST_WAIT = 600.0
"""Seconds for others to give room."""


@attrs.frozen(kw_only=True)
class ShardCache:
    """Where shards are kept.

    Args:
        folder: that is made if need be.
        bytes: that its shards have together at most; those used last stay.
        remote: where they come from.
    """

    folder: Path
    bytes: int
    remote: Remote

    @contextmanager
    def opened(self, shard: Shard, facts: Facts) -> Iterator[BinaryIO]:
        """Open a shard, fetched if it isn't there.

        Raises:
            ConfigError: the folder can't be written, or the shard is larger than all of it may be.
            DataError: the shard can't be read, or isn't what its index was made of.
        """
        key = digest_of_text([shard.identity, facts.size, facts.mark])[:32]
        path = self.folder / f"{key}.tar"
        with contextlib.ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(_locked(path.with_suffix(".lock"), fcntl.LOCK_SH))
                # Again, as another may remove it between the two locks.
                while not path.exists():
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if not path.exists():
                        self._fetch(shard, facts, path)
                    fcntl.flock(lock, fcntl.LOCK_SH)
                now = time.time_ns()  # the kernel's own time of a change is coarse, so that two uses look simultaneous
                os.utime(path, ns=(now, now))
                file = held.enter_context(path.open("rb"))
                if os.fstat(file.fileno()).st_size != facts.size:
                    raise _damaged(shard, path)
            except OSError as error:
                if is_read_failure(error):  # no fault of the folder: who reads the sample tries again
                    raise
                raise ConfigError(
                    "data.cache",
                    expected="a folder that can be read and written",
                    got=f"{str(self.folder)!r} ({error})",
                ) from error
            yield file

    def _fetch(self, shard: Shard, facts: Facts, path: Path) -> None:
        now = self.remote.facts(shard)
        if (now.size, now.mark) != (facts.size, facts.mark):
            raise DataError(
                shard.identity,
                expected=f"the shard of which its index was made, {facts.size:,} bytes with mark {facts.mark!r}",
                got=f"{now.size:,} bytes with mark {now.mark!r}",
                fix=REINDEX,
            )
        partial = path.with_suffix(".partial")
        try:
            self._reserve(partial, facts.size)
            with partial.open("r+b") as file:
                self.remote.download(shard, facts.size, file)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _reserve(self, partial: Path, size: int) -> None:
        if size > self.bytes:
            raise ConfigError("data.cache_bytes", expected=f"room for a shard of {size:,} bytes", got=f"{self.bytes:,}")
        end, wait = time.monotonic() + _LONGEST_WAIT, 0.02
        while True:
            with _locked(self.folder / "room.lock", fcntl.LOCK_EX):
                if self._make_room(partial, size):
                    with partial.open("wb") as file:
                        file.truncate(size)
                    return
            if time.monotonic() > end:
                raise ConfigError(
                    "data.cache_bytes",
                    expected=f"room for a shard of {size:,} bytes beside those that other processes use",
                    got=f"{self.bytes:,}, none of it free in {_LONGEST_WAIT:.0f} seconds",
                )
            time.sleep(wait)
            wait = min(2 * wait, 1.0)

    def _make_room(self, own: Path, size: int) -> bool:
        """Remove what was left by processes that ended and the shards that were used longest ago; False: not enough."""
        for partial in self.folder.glob("*.partial"):
            if partial != own:
                self._remove_unused(partial)
        # Those first: one that is finished meanwhile counts twice rather than not at all.
        used = sum(size for path, (_, size) in _files(self.folder, "*.partial").items() if path != own)
        shards = _files(self.folder, "*.tar")
        used += sum(size for _, size in shards.values())
        for path in sorted(shards, key=lambda path: shards[path]):
            if used + size <= self.bytes:
                break
            if self._remove_unused(path):
                used -= shards[path][1]
        return used + size <= self.bytes

    def _remove_unused(self, path: Path) -> bool:
        with suppress(BlockingIOError), _locked(path.with_suffix(".lock"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
            return True
        return False


def _files(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    """Return time of last use and bytes of each file; others may take files away meanwhile."""
    found = {}
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            status = path.stat()
            found[path] = (status.st_mtime_ns, status.st_size)
    return found


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, kind)
        try:
            yield handle
        finally:
            # Not by closing alone: a process forked meanwhile has the same handle open.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _damaged(shard: Shard, path: Path) -> DataError:
    return DataError(
        shard.identity, expected=f"all of the shard in {str(path)!r}", got="another size", fix="Remove that file."
    )
