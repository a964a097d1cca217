"""Fills a rank's tensors; in several threads where it has cores to itself: reads and checksums don't hold Python up.

A thread takes portions of files one after another, each with a reader and a slab of its own.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._read_box import Read, read_boxes
from mimo.checkpoint._reader import ShardReader, make_slab
from mimo.hooks import count_cores

_Portion: TypeAlias = tuple[str, list[Read]]
"""A shard, and what is read of it."""

PORTION_BYTES = 64 << 20
_MOST_THREADS = 4


def read_shards(
    folder: Path,
    manifest: Manifest,
    reads: Iterable[Read],
    *,
    threads: int,
    on_progress: Callable[[], None] | None = None,
) -> None:
    """Fill the targets of ``reads``, which come in the order of the files.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        reads: boxes and their targets.
        threads: how many read, this one included.
        on_progress: called for each block that this thread has read.

    Raises:
        CheckpointError: a file or block is damaged; names it. The other threads end what they are at.
    """
    portions = list(_cut(reads))
    left = iter(portions[1:])  # each thread takes the next one

    def work(first: Iterable[_Portion], on_progress: Callable[[], None] | None) -> None:
        slab = make_slab(manifest.block_bytes)
        try:
            for shard, portion in itertools.chain(first, left):
                with ShardReader(folder / shard, manifest.shards[shard], slab, on_progress=on_progress) as reader:
                    read_boxes(reader, portion)
        except BaseException:
            list(left)  # nothing is left for the others
            raise

    with ThreadPoolExecutor(threads) as pool:
        helpers = [pool.submit(work, (), None) for _ in range(min(threads, len(portions)) - 1)]
        work(portions[:1], on_progress)
    for helper in helpers:
        helper.result()


def own_place() -> str:
    """Return the host and the cores that this process may use: what ranks that share them have in common."""
    return f"{socket.gethostname()} {sum(1 << core for core in os.sched_getaffinity(0)):x}"


def count_threads(places: Sequence[str]) -> int:
    """Return how many threads this process may read with, beside those of all ranks, whose `own_place` is given."""
    return max(1, min(_MOST_THREADS, count_cores() // places.count(own_place())))


def _cut(reads: Iterable[Read]) -> Iterator[_Portion]:
    """Cut reads into portions of one shard, and of some MiB if no target is larger."""
    for shard, found in itertools.groupby(reads, key=lambda read: read.piece.shard):
        portion: list[Read] = []
        filled = 0
        for read in found:
            if portion and filled + read.target.nbytes > PORTION_BYTES:
                yield shard, portion
                portion, filled = [], 0
            portion.append(read)
            filled += read.target.nbytes
        yield shard, portion
