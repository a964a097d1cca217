"""A folder of safetensors files as others publish models; no number in it is trusted, and nothing in it is run."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from mimo.checkpoint._alone import INDEX_NAME, MODEL_NAME
from mimo.checkpoint._source import CHUNK_BYTES
from mimo.checkpoint._tensors import DTYPES, view_bytes
from mimo.hooks import CheckpointError, parse_json

_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LARGEST_JSON_BYTES = 100_000_000
_LENGTH_BYTES = 8
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_DIMS = 64
_SHOWN = 5
_FIX = "The file is damaged: fetch the folder again."


@attrs.frozen(kw_only=True)
class PublishedTensor:
    """Where a published folder holds a tensor: ``begin`` counts bytes of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numbers(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


@attrs.frozen(kw_only=True)
class PublishedFolder:
    """A folder's tensors by name; `open_published` makes it."""

    path: Path
    tensors: Mapping[str, PublishedTensor]

    def elements(self, name: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor from ``begin`` to ``end``, the last dim fastest, as 1-d tensors of some MiB.

        Each is good until the next one is asked for.

        Raises:
            CheckpointError: the file can't be read, or is shorter than it was.
        """
        one = self.tensors[name]
        size = one.dtype.itemsize
        most = CHUNK_BYTES // size
        buffer = torch.empty(min(most, end - begin), dtype=one.dtype)
        with _Opened(one.file) as file:
            for low in range(begin, end, most):
                chunk = buffer[: end - low]
                file.read_into(view_bytes(chunk), one.begin + low * size)
                yield chunk


def open_published(path: Path) -> PublishedFolder:
    """Return the tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Links are followed, as a download cache consists of them; names that lead out of the folder are refused.

    Raises:
        CheckpointError: there are none, or only pickles; shards are missing; or a file is not what it should be.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(str(path), expected="a folder", got="a file" if path.exists() else "nothing there")
    if (path / MODEL_NAME).exists():
        return PublishedFolder(path=path, tensors=_read_header(path / MODEL_NAME))
    if (path / INDEX_NAME).exists():
        return PublishedFolder(path=path, tensors=_read_shards(path))
    if pickles := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
        raise CheckpointError(
            str(path),
            expected=f"{MODEL_NAME}, or shards with {INDEX_NAME}",
            got=f"{pickles[0]}, a pickle, which can run any program when it is read, and is never opened",
            fix="Fetch the safetensors files of the same model, or have someone who trusts it save it anew with "
            "transformers: save_pretrained writes safetensors.",
        )
    raise CheckpointError(str(path), expected=f"{MODEL_NAME}, or shards with {INDEX_NAME}", got="neither")


def read_published_json(path: Path) -> Mapping[str, Any]:
    """Return the object that a JSON file of a published folder holds.

    Raises:
        CheckpointError: it is missing, absurdly large, or holds no JSON object, or one with a name given twice.
    """
    with _Opened(path) as file:
        if file.bytes > _LARGEST_JSON_BYTES:
            raise CheckpointError(str(path), expected=f"at most {_LARGEST_JSON_BYTES} bytes", got=str(file.bytes))
        text = file.read(0, file.bytes)
    try:
        value = parse_json(text, constants=True)
    except ValueError as error:
        raise CheckpointError(str(path), expected="JSON", got=str(error), fix=_FIX) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), expected="a JSON object", got=type(value).__name__, fix=_FIX)
    return value


def _read_shards(path: Path) -> dict[str, PublishedTensor]:
    index = read_published_json(path / INDEX_NAME)
    where, files = str(path / INDEX_NAME), index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(where, expected="a weight_map from names of tensors to files", got=repr(files)[:80])
    for file in files.values():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                where, expected="plain names of .safetensors files in this folder", got=repr(file)[:80], fix=_FIX
            )
    shards = sorted(set(files.values()))
    if missing := [file for file in shards if not (path / file).exists()]:
        raise CheckpointError(
            str(path),
            expected=f"the {len(shards)} shards that {INDEX_NAME} names",
            got=f"{len(missing)} of them missing: {shorten(missing)}",
            fix="Fetch them too.",
        )
    found: dict[str, PublishedTensor] = {}
    strays = []
    for shard in shards:
        for name, one in _read_header(path / shard).items():
            if files.get(name) == shard:
                found[name] = one
            else:
                strays.append(f"{name} in {shard}")
    if strays:
        raise CheckpointError(where, expected="an index of all that its shards hold", got=f"none of {shorten(strays)}")
    if missing := sorted(files.keys() - found.keys()):
        raise CheckpointError(
            where, expected="tensors that its shards hold", got=f"{len(missing)} that are not there: {shorten(missing)}"
        )
    return found


def _read_header(path: Path) -> dict[str, PublishedTensor]:
    """Return a file's tensors, every number of its header checked against the file's size."""
    with _Opened(path) as file:
        length = int.from_bytes(file.read(0, min(_LENGTH_BYTES, file.bytes)), "little")
        most = min(_LARGEST_HEADER_BYTES, file.bytes - _LENGTH_BYTES)
        if not 2 <= length <= most:  # noqa: PLR2004  # of an empty object
            raise CheckpointError(
                f"{path} header",
                expected=f"a length of 2 to {max(most, 2)} bytes, as the file has {file.bytes}",
                got=str(length),
                fix=_FIX,
            )
        start, end = _LENGTH_BYTES + length, file.bytes
        try:
            header = parse_json(file.read(_LENGTH_BYTES, length))
        except ValueError as error:
            raise CheckpointError(f"{path} header", expected="JSON", got=str(error), fix=_FIX) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} header", expected="a JSON object", got=type(header).__name__, fix=_FIX)
    found = {name: _read_entry(path, name, one, start) for name, one in header.items() if name != "__metadata__"}
    filled = start
    for name, one in sorted(found.items(), key=lambda item: (item[1].begin, item[1].numbers)):
        if one.begin != filled:
            raise CheckpointError(
                f"{path}: {name}",
                expected=f"data that begin at byte {filled - start}, where those before them end",
                got=f"at byte {one.begin - start}",
                fix=_FIX,
            )
        filled += one.numbers * one.dtype.itemsize
    if filled != end:
        raise CheckpointError(str(path), expected=f"{filled} bytes, as its header says", got=str(end), fix=_FIX)
    return found


def _read_entry(path: Path, name: str, entry: Any, start: int) -> PublishedTensor:
    where = f"{path}: {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(where, expected="dtype, shape and data_offsets", got=repr(entry)[:80], fix=_FIX)
    code, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(where, expected=f"a dtype of {', '.join(DTYPES)}", got=repr(code)[:80])
    if not _are_sizes(shape) or len(shape) > _MOST_DIMS:
        raise CheckpointError(where, expected=f"a shape of up to {_MOST_DIMS} sizes", got=repr(shape)[:80], fix=_FIX)
    bytes_ = math.prod(shape) * DTYPES[code].itemsize
    if not _are_sizes(span) or len(span) != 2 or span[1] - span[0] != bytes_:  # noqa: PLR2004  # begin and end
        raise CheckpointError(
            where, expected=f"a range of {bytes_} bytes, as shape and dtype say", got=repr(span)[:80], fix=_FIX
        )
    return PublishedTensor(file=path, dtype=DTYPES[code], shape=tuple(shape), begin=start + span[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in value)


def shorten(names: list[str]) -> str:
    """Return the first few of many names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class _Opened:
    """A regular file that is read at given places."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for ever
        except OSError as error:
            raise self._unreadable(error) from error
        state = os.fstat(self._file)
        self.bytes = state.st_size
        if not stat.S_ISREG(state.st_mode):
            os.close(self._file)
            raise CheckpointError(str(path), expected="a regular file", got="something else")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._file)

    def read(self, begin: int, count: int) -> bytes:
        """Return ``count`` bytes from ``begin`` on."""
        found = bytearray(count)
        self.read_into(memoryview(found), begin)
        return bytes(found)

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fill ``target`` with the bytes from ``begin`` on."""
        filled = 0
        while filled < len(target):
            try:
                count = os.preadv(self._file, [target[filled:]], begin + filled)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise CheckpointError(
                    str(self._path), expected=f"at least {begin + len(target)} bytes", got=str(begin + filled), fix=_FIX
                )
            filled += count

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            str(self._path), expected="a file that can be read", got=f"{type(error).__name__}: {error.strerror}"
        )
