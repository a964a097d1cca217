"""Rewriting a checkpoint in other pieces: by one process, block by block, without holding a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from mimo.checkpoint._alone import commit_alone
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest, TensorEntry
from mimo.checkpoint._matching import matches
from mimo.checkpoint._source import Source
from mimo.checkpoint._tensors import DTYPES, view_bytes
from mimo.checkpoint._writer import SHARD_BYTES, Cut, Layout, lay_out
from mimo.hooks import CheckpointError


def reshard(
    source: Path, target: Path, *, parts: int = 1, shard_bytes: int = SHARD_BYTES, drop: Iterable[str] = ()
) -> Path:
    """Rewrite a checkpoint so that each tensor is cut along its first dim into ``parts`` pieces; return its new folder.

    For one process alone. Some MiB are held at a time, whatever the size of a tensor, and every block is verified. JSON
    values, step, config and topology stay as they are. It loads as the old one does, in any layout.

    Args:
        source: a committed checkpoint.
        target: holds all steps, as for `mimo.checkpoint.save`; made if missing. What dead saves left there is removed,
            so no run may be saving there.
        parts: pieces of each tensor, fewer where it has fewer rows; balanced over as many series of files.
        shard_bytes: a new file of a series is begun before one would hold more bytes of data; a larger piece has its
            own file.
        drop: glob patterns (`fnmatch`) of names, tensors and values, to leave out: ``optimizer.*``.

    Raises:
        WriteError: files could not be written.
        CheckpointError: an argument is wrong, the source is damaged, or the target holds this step already. Nothing is
            committed then.
    """
    source, target, drop = Path(source), Path(target), tuple(drop)
    for name, number in (("parts", parts), ("shard bytes", shard_bytes)):
        if number < 1:
            raise CheckpointError(name, expected="at least 1", got=repr(number))
    with Source(source) as opened:
        remaining = _without(opened.manifest, drop)
        cuts = _cut(remaining.tensors, parts)
        layouts = [
            layout for part, found in enumerate(cuts) for layout in lay_out(part, found, shard_bytes=shard_bytes)
        ]

        def data(layout: Layout) -> Iterator[memoryview]:
            for slot in layout.slots:
                yield from map(view_bytes, opened.chunks(slot.cut.name, slot.cut.box))

        return commit_alone(target, remaining, layouts, data)


def _without(manifest: Manifest, drop: Sequence[str]) -> Manifest:
    for pattern in drop:
        if not any(matches(name, (pattern,)) for name in manifest.names):
            raise CheckpointError("drop", expected="patterns that fit a name of the checkpoint", got=repr(pattern))
    return attrs.evolve(
        manifest,
        tensors={name: entry for name, entry in manifest.tensors.items() if not matches(name, drop)},
        common={name: value for name, value in manifest.common.items() if not matches(name, drop)},
        owned={name: entry for name, entry in manifest.owned.items() if not matches(name, drop)},
    )


def _cut(tensors: Mapping[str, TensorEntry], parts: int) -> list[list[Cut]]:
    """Return the pieces of each part: the largest first, each to the part that holds least, a tensor's to several."""
    found: list[list[Cut]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for name, entry in sorted(tensors.items(), key=lambda item: (-_bytes(item[1]), item[0])):
        order = sorted(range(parts), key=lambda part: filled[part])
        for part, box in zip(order, _rows(entry.shape, parts), strict=False):  # a tensor of few rows has fewer pieces
            cut = Cut(name=name, box=box, dtype=DTYPES[entry.dtype])
            found[part].append(cut)
            filled[part] += cut.bytes
    return found


def _rows(shape: tuple[int, ...], parts: int) -> Iterator[Box]:
    """Yield boxes of rows, the longer ones first."""
    if not shape:
        yield Box((), ())
        return
    each, more = divmod(shape[0], parts)
    for part in range(min(parts, shape[0])):
        low = part * each + min(part, more)
        yield Box((low, *(0 for _ in shape[1:])), (each + (part < more), *shape[1:]))


def _bytes(entry: TensorEntry) -> int:
    return Box(entry.shape, entry.shape).elements * DTYPES[entry.dtype].itemsize
