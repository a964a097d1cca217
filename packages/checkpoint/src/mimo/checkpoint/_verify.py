"""Reading and checking all of a checkpoint, with our own reader and with the safetensors library as a second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
from safetensors import SafetensorError, safe_open

from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._reader import ShardReader
from mimo.hooks import CheckpointError


@attrs.frozen(kw_only=True)
class Verified:
    """What was read and found right; ``bytes`` counts those of all shards."""

    tensors: int
    shards: int
    blocks: int
    bytes: int


def verify(step_folder: Path) -> Verified:
    """Read every byte of a checkpoint and compare it with its checksums; not collective.

    Raises:
        CheckpointError: lists all that is damaged or missing, by file and block.
    """
    folder = Path(step_folder)
    manifest = read_manifest(folder)
    problems = [problem for name in sorted(manifest.shards) for problem in _find_problems(folder, name, manifest)]
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


def _find_problems(folder: Path, name: str, manifest: Manifest) -> Iterator[str]:
    path, entry = folder / name, manifest.shards[name]
    try:
        with ShardReader(path, entry, manifest.block_bytes) as reader:
            for index in range(len(entry.blocks)):
                try:
                    reader.check_block(index)
                except CheckpointError as error:
                    yield f"{error.where}: expected {error.expected}, got {error.got}"
            yield from _compare_header(path, manifest)
    except CheckpointError as error:
        yield f"{error.where}: expected {error.expected}, got {error.got}"


def _compare_header(path: Path, manifest: Manifest) -> Iterator[str]:
    expected = {
        name: (entry.dtype, piece.box.shape)
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
        if piece.shard == path.name
    }
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        yield f"{path} header: expected safetensors, got {error}"
        return
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            yield f"{path} header: expected {expected.get(name)} for {name}, got {found.get(name)}"
