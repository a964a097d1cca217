"""One process writes a whole checkpoint, or a published folder, from tensors that it holds a few MiB of at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from mimo.checkpoint import _folder
from mimo.checkpoint._blocks import BLOCK_BYTES
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import Manifest, Piece, TensorEntry
from mimo.checkpoint._ranks import Failure, Ranks, take
from mimo.checkpoint._save import seal
from mimo.checkpoint._tensors import CODES, view_bytes
from mimo.checkpoint._writer import SHARD_BYTES, Cut, Layout, lay_out, sync_folder, write_layouts
from mimo.hooks import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MODEL_NAME = "model.safetensors"
_NOTHING_LEFT = "Nothing is left of it. Make room, or look at the disk, and write it again."


@attrs.frozen(kw_only=True)
class Stream:
    """A tensor that is written as it comes.

    Args:
        dtype: one that safetensors has.
        shape: of all of it.
        chunks: gives its elements, the last dim fastest, as contiguous 1-d CPU tensors of ``dtype``; each is used
            before the next one is asked for.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[torch.Tensor]]

    @property
    def cut(self) -> Box:
        """All of it."""
        return Box(tuple(0 for _ in self.shape), self.shape)


def write_checkpoint(
    target: Path,
    streams: Mapping[str, Stream],
    *,
    step: int = 0,
    config: Mapping[str, Any],
    topology: Mapping[str, Any],
    common: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint of tensors that come from elsewhere, and return its folder. For one process alone.

    Args:
        target: holds all steps, as for `mimo.checkpoint.save`; made if missing. What dead saves left there is removed,
            so no run may be saving there.
        streams: by flat name.
        step: of it.
        config: as for `mimo.checkpoint.save`.
        topology: likewise.
        common: JSON values by flat name.
        shard_bytes: see `mimo.checkpoint.save`.

    Raises:
        WriteError: files could not be written.
        CheckpointError: the target holds this step already, or a stream fails. Nothing is committed then.
    """
    about = Manifest(
        step=step,
        block_bytes=BLOCK_BYTES,
        tensors={
            name: TensorEntry(dtype=CODES[one.dtype], shape=one.shape, pieces=()) for name, one in streams.items()
        },
        shards={},
        common=common,
        owned={},
        topology=topology,
        config=config,
    )
    layouts = lay_out(0, _whole(streams), shard_bytes=shard_bytes)
    return commit_alone(Path(target), about, layouts, lambda layout: _bytes_of(layout, streams))


def write_safetensors(
    folder: Path,
    streams: Mapping[str, Stream],
    *,
    texts: Mapping[str, str],
    copied: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    file: str = MODEL_NAME,
) -> Path:
    """Write a folder as others publish models: ``model.safetensors``, or shards with an index; return it.

    It is written beside under another name, synced, and renamed once.

    Args:
        folder: must not exist.
        streams: by the names that the files are to have.
        texts: further files by name, ``config.json``.
        copied: files that are copied into it, under the names that they have.
        shard_bytes: a new file is begun before one would hold more bytes of data; a larger tensor has its own.
        file: what it is called if it is one.

    Raises:
        WriteError: files could not be written.
        CheckpointError: the folder exists, a stream fails, or a file can't be read. There is no folder then.
    """
    folder = Path(folder)
    _refuse_existing(folder, "a new folder")
    found = lay_out(0, _whole(streams), shard_bytes=shard_bytes)
    names = (
        [file]
        if len(found) == 1
        else [f"model-{at + 1:05d}-of-{len(found):05d}.safetensors" for at in range(len(found))]
    )
    layouts = [attrs.evolve(layout, shard=name) for layout, name in zip(found, names, strict=True)]
    if len(layouts) > 1:
        index = {
            "metadata": {"total_size": sum(layout.data_bytes for layout in layouts)},
            "weight_map": {slot.cut.name: layout.shard for layout in layouts for slot in layout.slots},
        }
        texts = {**texts, INDEX_NAME: json.dumps(index, indent=2, sort_keys=True) + "\n"}
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")

    def write() -> Path:
        partial.mkdir(parents=True)
        write_layouts(partial, layouts, lambda layout: _bytes_of(layout, streams))
        for name, text in texts.items():
            with (partial / name).open("x", encoding="utf-8") as opened:
                opened.write(text)
                opened.flush()
                os.fsync(opened.fileno())
        for source in copied:
            _copy(source, partial / source.name)
        sync_folder(partial)
        _refuse_existing(folder, "a new folder")
        partial.rename(folder)
        sync_folder(folder.parent)
        return folder

    try:
        return take(Ranks(rank=0, size=1).attempt(write, where=str(folder), writes=True, fix=_NOTHING_LEFT))
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # it isn't there any more where all went well


def commit_alone(
    target: Path, about: Manifest, layouts: Sequence[Layout], data: Callable[[Layout], Iterable[memoryview]]
) -> Path:
    """Write shards and commit them as the step of ``about``, whose tensors get their pieces from the layouts.

    Raises:
        WriteError: files could not be written.
        CheckpointError: the target holds this step already, or ``data`` fails. Nothing is committed then.
    """
    final = target / _folder.name_step(about.step)
    alone, room = Ranks(rank=0, size=1), sum(layout.data_bytes for layout in layouts)
    _refuse_existing(final, "a folder without this step")

    def write(partial: Path) -> Path:
        shards = write_layouts(partial, layouts, data)
        _refuse_existing(final, "a folder without this step")  # put back there since, or saved meanwhile
        pieces: dict[str, list[Piece]] = {name: [] for name in about.tensors}
        for name, piece in (found for layout in layouts for found in layout.pieces()):
            pieces[name].append(piece)
        tensors = {
            name: attrs.evolve(entry, pieces=tuple(sorted(pieces[name], key=lambda piece: piece.box.offset)))
            for name, entry in about.tensors.items()
        }
        return seal(partial, attrs.evolve(about, block_bytes=BLOCK_BYTES, tensors=tensors, shards=shards))

    partial = take(alone.attempt(lambda: _folder.begin(target, about.step, room=room), where=str(final), writes=True))
    outcome = alone.attempt(lambda: write(partial), where=str(final), writes=True)
    if isinstance(outcome, Failure):
        shutil.rmtree(partial, ignore_errors=True)  # else the next save deletes it
    return take(outcome)


def _refuse_existing(path: Path, expected: str) -> None:
    if path.exists():
        got = "one that holds it" if expected.endswith("step") else "one that exists"
        raise CheckpointError(str(path), expected=expected, got=got, fix="Name another one.")


def _copy(source: Path, target: Path) -> None:
    """Copy a file and sync it; an error names the file."""
    try:
        opened = source.open("rb")
    except OSError as error:
        raise CheckpointError(
            str(source), expected="a file that can be read", got=f"{type(error).__name__}: {error.strerror}"
        ) from error
    with opened, target.open("xb") as written:
        shutil.copyfileobj(opened, written)
        written.flush()
        os.fsync(written.fileno())


def _whole(streams: Mapping[str, Stream]) -> list[Cut]:
    return [Cut(name=name, box=one.cut, dtype=one.dtype) for name, one in streams.items()]


def _bytes_of(layout: Layout, streams: Mapping[str, Stream]) -> Iterator[memoryview]:
    for slot in layout.slots:
        stream, written = streams[slot.cut.name], 0
        for chunk in stream.chunks():
            assert chunk.dtype == stream.dtype, (slot.cut, chunk.dtype)
            written += len(chunk)
            yield view_bytes(chunk)
        assert written == slot.cut.box.elements, (slot.cut, written)
