"""Reading and checking all of a checkpoint, with our own reader and with the safetensors library as a second one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
from safetensors import SafetensorError, safe_open

from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._reader import ShardReader, make_slab
from mimo.hooks import CheckpointError, parse_json

_Stored = tuple[str, tuple[int, ...], int, int]
"""A piece from a header: dtype, shape, and where it begins and ends in the file."""


@attrs.frozen(kw_only=True)
class Verified:
    """Counts of what was read and is undamaged; ``bytes`` are those of all shards."""

    tensors: int
    shards: int
    blocks: int
    bytes: int


def verify(step_folder: Path) -> Verified:
    """Read every byte of a checkpoint and compare it with its checksums; not collective.

    Raises:
        CheckpointError: something is damaged or missing; the message lists all of it by file and block.
    """
    folder = Path(step_folder)
    manifest = read_manifest(folder)
    problems = [
        problem
        for name, pieces in sorted(_pieces_by_shard(manifest).items())
        for problem in _find_problems(folder, name, manifest, pieces)
    ]
    if problems:
        raise CheckpointError(
            str(folder),
            expected="files as they were written",
            got=f"{len(problems)} damaged:" + "".join(f"\n  {problem}" for problem in problems) + "\n",
            fix="Load another checkpoint.",
        )
    return Verified(
        tensors=len(manifest.tensors),
        shards=len(manifest.shards),
        blocks=sum(len(entry.blocks) for entry in manifest.shards.values()),
        bytes=sum(entry.bytes for entry in manifest.shards.values()),
    )


def _find_problems(folder: Path, name: str, manifest: Manifest, pieces: Mapping[str, _Stored]) -> Iterator[str]:
    path, entry = folder / name, manifest.shards[name]
    try:
        with ShardReader(path, entry, make_slab(manifest.block_bytes)) as reader:
            for index in range(len(entry.blocks)):
                try:
                    reader.read(index)
                except CheckpointError as error:
                    yield f"{error.where}: expected {error.expected}, got {error.got}"
            yield from (f"{path} header: {problem}" for problem in _compare_header(reader.header(), pieces))
    except CheckpointError as error:
        yield f"{error.where}: expected {error.expected}, got {error.got}"
        return
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except SafetensorError as error:
        yield f"{path} header: expected safetensors, got {error}"


def _compare_header(header: bytes, pieces: Mapping[str, _Stored]) -> Iterator[str]:
    try:
        entries = parse_json(header[8:])
        found = {
            name: (entry["dtype"], tuple(entry["shape"]), *(len(header) + offset for offset in entry["data_offsets"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        yield f"expected safetensors, got {type(error).__name__}: {error}"
        return
    for name in sorted({*pieces, *found}):
        if pieces.get(name) != found.get(name):
            yield f"expected {pieces.get(name)} for {name}, got {found.get(name)}"


def _pieces_by_shard(manifest: Manifest) -> dict[str, dict[str, _Stored]]:
    found: dict[str, dict[str, _Stored]] = {name: {} for name in manifest.shards}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            found[piece.shard][name] = (entry.dtype, piece.box.shape, piece.begin, piece.end)
    return found
