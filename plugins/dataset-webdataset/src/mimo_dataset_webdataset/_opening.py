"""Shards opened by number, files here and others through the cache; none stays open, so forks and threads are safe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache as memoized
from pathlib import Path
from typing import BinaryIO

import attrs

from mimo.hooks import ConfigError, DataError
from mimo_dataset_webdataset._cache import ShardCache
from mimo_dataset_webdataset._known import Facts, Known, local_facts, read_index, read_table
from mimo_dataset_webdataset._shards import Shard, Shards


@attrs.frozen(kw_only=True, eq=False)
class Opener:
    """What opens shards.

    Args:
        shards: in order.
        cache: for those that lie elsewhere; None where all lie here.
        facts: returns those of a shard by its number.
    """

    shards: tuple[Shard, ...]
    cache: ShardCache | None
    facts: Callable[[int], Facts]

    def opened(self, number: int) -> AbstractContextManager[BinaryIO]:
        """Open a shard.

        Raises:
            DataError: it can't be fetched.
            OSError: it can't be opened.
        """
        shard = self.shards[number]
        if self.cache is None or shard.is_local:
            return Path(shard.address).open("rb")
        return self.cache.opened(shard, self.facts(number))


def read_headers(shards: Shards, cache: ShardCache | None) -> Known:
    """Return where everything lies, read from the shards themselves; those elsewhere are fetched one after the other.

    Raises:
        ConfigError: one is no tar of samples.
        DataError: one can't be read.
    """

    @memoized
    def facts(number: int) -> Facts:
        shard = shards.shards[number]
        try:
            return local_facts(shard) if cache is None or shard.is_local else cache.remote.facts(shard)
        except OSError as error:
            raise DataError(shard.identity, expected="a readable tar", got=str(error)) from error

    opener = Opener(shards=shards.shards, cache=cache, facts=facts)
    return Known(table=read_table(shards, opener.opened), facts=facts)


def open_known(shards: Shards, cache: ShardCache | None) -> tuple[Known, Opener]:
    """Return where everything lies, from the index if there is one, and what opens the shards.

    Raises:
        ConfigError: the index is damaged or stale, there is none of shards elsewhere, or one is no tar of samples.
        DataError: a shard can't be read.
    """
    known = read_index(shards)
    if known is None and not shards.is_local:
        raise ConfigError(
            shards.setting,
            expected="an index of shards that lie elsewhere",
            got=f"none of {shards.expression!r}",
            fix="Run mimo data index FILE with the file of settings; it fetches each shard once.",
        )
    known = known or read_headers(shards, cache)
    return known, Opener(shards=shards.shards, cache=cache, facts=known.facts)
