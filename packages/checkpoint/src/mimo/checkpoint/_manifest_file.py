"""`manifest.json`: writing it, and reading it back without trusting a single number in it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from mimo.checkpoint import _json
from mimo.checkpoint._blocks import digest, digest_parts
from mimo.checkpoint._boxes import Box, covers_once
from mimo.checkpoint._manifest import Manifest, OwnedEntry, Piece, ShardEntry, TensorEntry
from mimo.checkpoint._tensors import DTYPES
from mimo.hooks import CheckpointError, JsonNode, JsonSource

FORMAT = "mimo-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

_LARGEST_MANIFEST_BYTES = 1 << 30
_LARGEST_HEADER_BYTES = 8 + 100_000_000  # the limit of the safetensors library
_BLOCK_BYTES = range(1 << 12, (1 << 26) + 1, 1 << 12)
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_HEAD = re.compile(rb'\{"digest":"([0-9a-f]{32})","body":')
_HEAD_BYTES = 52
_TAIL = b"}\n"
_PART_BYTES = 1 << 20
_MOST_DIMS = 64  # of a torch tensor
_STEP_FOLDER = re.compile(r"step_([0-9]{8,18})|\.step_([0-9]{8,18})\..*")
_DAMAGED = "The checkpoint is damaged or not ours: load another one."


def to_bytes(manifest: Manifest) -> bytes:
    """Return the file's content: one JSON object, the digest taken over the exact bytes of its body.

    Raises:
        CheckpointError: it is larger than a reader takes.
    """
    body = _json.write(_to_json(manifest)).encode()
    if (size := _HEAD_BYTES + len(body) + len(_TAIL)) > _LARGEST_MANIFEST_BYTES:
        raise CheckpointError(
            MANIFEST_NAME,
            expected=f"at most {_LARGEST_MANIFEST_BYTES} bytes",
            got=str(size),
            fix="Large data in values (Common, Owned) belongs into tensors.",
        )
    return b'{"digest":"' + digest(body).encode() + b'","body":' + body + b"}\n"


def read_manifest(step_folder: Path) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Its digest is compared, and every size, offset and file name in it is checked before it is believed.

    Args:
        step_folder: ``…/checkpoints/step_00000100``.

    Raises:
        CheckpointError: the folder holds no manifest, or one that is damaged, of an unknown version or inconsistent.
    """
    path = Path(step_folder) / MANIFEST_NAME
    try:
        # A link could lead out of the folder, a pipe would wait for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_digest(file, str(path))
            file.seek(0)
            manifest = parse(file.read(), str(path))
    except OSError as error:
        raise CheckpointError(
            str(path), expected="the manifest of a checkpoint", got=f"{type(error).__name__}: {error.strerror}"
        ) from error
    named = _STEP_FOLDER.fullmatch(Path(step_folder).absolute().name)
    if named and int(named[1] or named[2]) != manifest.step:
        raise CheckpointError(
            str(path),
            expected=f"the manifest of step {int(named[1] or named[2])}, as its folder is named",
            got=f"that of step {manifest.step}",
            fix=_DAMAGED,
        )
    return manifest


def parse(data: bytes, where: str) -> Manifest:
    """Return the manifest that ``data`` holds; ``where`` names its file in messages.

    Raises:
        CheckpointError: see `read_manifest`.
    """
    head = _HEAD.match(data)
    if head is None or not data.endswith(_TAIL):
        raise CheckpointError(where, expected="a digest and a body", got=f"{len(data)} other bytes", fix=_DAMAGED)
    body = memoryview(data)[head.end() : -len(_TAIL)]
    _compare(head[1].decode(), digest(body), where)
    source = JsonSource(where=where, error=CheckpointError, fix=_DAMAGED, separator=": ")
    root = source.parse(bytes(body))
    try:
        return _from_json(root)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # of values that hold more than JSON
        raise CheckpointError(where, expected="JSON", got=str(error), fix=_DAMAGED) from error


def _check_digest(file: BinaryIO, where: str) -> None:
    """Refuse a file that is not ours from end to end, before all of it is held."""
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode) or state.st_size > _LARGEST_MANIFEST_BYTES:
        raise CheckpointError(
            where,
            expected=f"a regular file of at most {_LARGEST_MANIFEST_BYTES} bytes",
            got=f"{state.st_size} bytes" if stat.S_ISREG(state.st_mode) else "something else",
            fix=_DAMAGED,
        )
    head = _HEAD.match(file.read(_HEAD_BYTES))
    if head is None:
        raise CheckpointError(where, expected="a digest and a body", got=f"{state.st_size} other bytes", fix=_DAMAGED)
    left = max(0, state.st_size - _HEAD_BYTES - len(_TAIL))
    parts = (file.read(min(_PART_BYTES, left - at)) for at in range(0, left, _PART_BYTES))
    _compare(head[1].decode(), digest_parts(parts), where)


def _compare(expected: str, got: str, where: str) -> None:
    if got != expected:
        raise CheckpointError(where, expected=f"the digest {expected}", got=got, fix=_DAMAGED)


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "block_bytes": manifest.block_bytes,
        "structure": manifest.structure,
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [
                    {
                        "shard": piece.shard,
                        "offset": piece.box.offset,
                        "shape": piece.box.shape,
                        "bytes": [piece.begin, piece.end],
                    }
                    for piece in entry.pieces
                ],
            }
            for name, entry in manifest.tensors.items()
        },
        "shards": {
            name: {
                "bytes": entry.bytes,
                "header": {"bytes": entry.header_bytes, "checksum": entry.header_checksum},
                "blocks": entry.blocks,
            }
            for name, entry in manifest.shards.items()
        },
        "common": {name: _json.encode(value, name) for name, value in manifest.common.items()},
        "owned": {
            name: {"module": entry.module, "value": _json.encode(entry.value, name)}
            for name, entry in manifest.owned.items()
        },
        "topology": _json.encode(dict(manifest.topology), "topology"),
        "config": _json.encode(dict(manifest.config), "config"),
    }


def _from_json(root: JsonNode) -> Manifest:
    if root["format"].value != FORMAT or root["version"].value != FORMAT_VERSION:
        raise CheckpointError(
            root.where,
            expected=f"{FORMAT!r} version {FORMAT_VERSION}",
            got=f"{root['format'].value!r} version {root['version'].value!r}",
            fix="Read it with the mimo-checkpoint that wrote it.",
        )
    block_bytes = root["block_bytes"].size()
    if block_bytes not in _BLOCK_BYTES:
        raise root["block_bytes"].fail("between 4 KiB and 64 MiB, a multiple of 4 KiB")
    shards = {name: _read_shard(name, node, block_bytes) for name, node in root["shards"].items()}
    manifest = Manifest(
        step=root["step"].size(),
        block_bytes=block_bytes,
        shards=shards,
        tensors={name: _read_tensor(node, shards) for name, node in root["tensors"].items()},
        common=_read_values(root["common"]),
        owned={
            name: OwnedEntry(module=node["module"].text(), value=_json.decode(node["value"].value))
            for name, node in root["owned"].items()
        },
        topology=_read_values(root["topology"]),
        config=_read_values(root["config"]),
    )
    if len(manifest.names) != len(manifest.tensors) + len(manifest.common) + len(manifest.owned):
        raise CheckpointError(root.where, expected="each name once", got="one in two places", fix=_DAMAGED)
    if root["structure"].value != manifest.structure:
        raise root["structure"].fail(f"the signature {manifest.structure}")
    return manifest


def _read_values(node: JsonNode) -> dict[str, Any]:
    return {name: _json.decode(part.value) for name, part in node.items()}


def _read_shard(name: str, node: JsonNode, block_bytes: int) -> ShardEntry:
    if not _SHARD_NAME.fullmatch(name):
        raise CheckpointError(node.where, expected="a plain file name", got=repr(name), fix=_DAMAGED)
    entry = ShardEntry(
        bytes=node["bytes"].size(),
        header_bytes=node["header"]["bytes"].size(),
        header_checksum=_read_checksum(node["header"]["checksum"]),
        blocks=tuple(map(_read_checksum, node["blocks"].list())),
    )
    if not 8 < entry.header_bytes <= min(entry.bytes, _LARGEST_HEADER_BYTES):  # noqa: PLR2004  # its length field
        raise node["header"].fail("a header inside the file, of at most 100 MB")
    if len(entry.blocks) != -(-(entry.bytes - entry.header_bytes) // block_bytes):
        raise node["blocks"].fail(f"one checksum for each {block_bytes} bytes of data")
    return entry


def _read_checksum(node: JsonNode) -> str:
    if not _CHECKSUM.fullmatch(node.text()):
        raise node.fail("a checksum")
    return node.text()


def _read_tensor(node: JsonNode, shards: dict[str, ShardEntry]) -> TensorEntry:
    code, shape = node["dtype"].text(), node["shape"].sizes()
    if len(shape) > _MOST_DIMS:
        raise node["shape"].fail(f"at most {_MOST_DIMS} dims")
    if code not in DTYPES:
        raise node["dtype"].fail(f"one of {', '.join(DTYPES)}")
    pieces = tuple(_read_piece(part, DTYPES[code].itemsize, shards) for part in node["pieces"].list())
    if not covers_once(shape, [piece.box for piece in pieces]):
        raise node["pieces"].fail(f"pieces that cover the shape {list(shape)} exactly once")
    return TensorEntry(dtype=code, shape=shape, pieces=pieces)


def _read_piece(node: JsonNode, item_bytes: int, shards: dict[str, ShardEntry]) -> Piece:
    shard = node["shard"].text()
    if shard not in shards:
        raise node["shard"].fail("the name of a listed shard")
    box = Box(offset=node["offset"].sizes(), shape=node["shape"].sizes())
    span = node["bytes"].sizes()
    if len(span) != 2 or not shards[shard].header_bytes <= span[0] <= span[1] <= shards[shard].bytes:  # noqa: PLR2004
        raise node["bytes"].fail("a range inside the data of its shard")
    if span[1] - span[0] != box.elements * item_bytes:
        raise node["bytes"].fail(f"a range of {box.elements * item_bytes} bytes, as its shape and dtype say")
    if (span[0] - shards[shard].header_bytes) % item_bytes:
        raise node["bytes"].fail(f"a range that begins at a multiple of {item_bytes} bytes of its shard's data")
    return Piece(shard=shard, box=box, begin=span[0], end=span[1])
