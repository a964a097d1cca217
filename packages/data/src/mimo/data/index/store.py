"""A few arrays in one file, written whole or not at all, and read as pages of the file.

The format is that of safetensors: eight bytes with the length of a JSON header, the header, the arrays. Nothing of it
is ever executed, and no more is allocated than the file is long. Among the header's texts is a checksum of all that
follows the eight bytes, itself counted as zeros.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.hooks import parse_json

_PREFIX = 8
_MAX_HEADER = 1 << 20
"""Bytes."""
_KINDS = {"U8": "|u1", "I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8"}
_ABOUT = "__metadata__"
_CHECKSUM = "checksum"
_BEFORE = b'"checksum":"'
"""What stands before it in a header: in a text, quotation marks would have a backslash."""
_UNKNOWN = b"00000000"
_AT_ONCE = 1 << 20


class IndexFileError(ValueError):
    """A file that is not what `write_arrays` writes."""


@attrs.frozen(kw_only=True, eq=False)
class StoredArrays:
    """What a file holds.

    Args:
        about: texts by name.
        arrays: by name, of which only the pages that are looked at are read.
    """

    about: Mapping[str, str]
    arrays: Mapping[str, NDArray[Any]]


@attrs.frozen(kw_only=True, eq=False)
class Pieces:
    """An array that is written piece after piece, so that it is never in memory whole.

    Args:
        dtype: of its elements.
        length: sum of the pieces' lengths.
        pieces: arrays of one dim, read once.
    """

    dtype: np.dtype[Any]
    length: int
    pieces: Iterable[NDArray[Any]]


def joined_blocks(
    blocks: Sequence[int],
    read: Callable[[int], Mapping[str, NDArray[Any]]],
    kinds: Mapping[str, str],
    offsets: Collection[str],
) -> dict[str, Pieces]:
    """Return the arrays of blocks one block after another, with one in memory at a time.

    Args:
        blocks: their numbers, in order; at least one.
        read: returns the arrays of one of them.
        kinds: of the arrays to join, by name.
        offsets: those that count from 0 in each block, with one number more than there are spans: they count on.
    """
    lengths = dict.fromkeys(kinds, 0)
    for block in blocks:
        arrays = read(block)
        for name in kinds:
            lengths[name] += len(arrays[name]) - (name in offsets and block != blocks[0])

    def pieces(name: str) -> Iterator[NDArray[Any]]:
        begin = 0
        for block in blocks:
            array = read(block)[name]
            if name in offsets:
                array = array[(block != blocks[0]) :] + begin
                begin = int(array[-1]) if len(array) else begin
            yield array

    return {
        name: Pieces(dtype=np.dtype(kind), length=lengths[name], pieces=pieces(name)) for name, kind in kinds.items()
    }


def are_offsets(offsets: NDArray[np.int64], spans: int, length: int) -> bool:
    """Tell whether offsets cut so many elements into so many spans, as far as their ends say."""
    return len(offsets) == spans + 1 and offsets[0] == 0 and offsets[-1] == length


def span_of(offsets: NDArray[np.int64], index: int, limit: int) -> tuple[int, int]:
    """Return where a span begins and stops.

    Raises:
        IndexFileError: not among ``limit`` elements.
    """
    begin, stop = offsets[index : index + 2].tolist()
    if not 0 <= begin <= stop <= limit:
        raise IndexFileError(contradiction(begin, stop, limit))
    return begin, stop


def contradiction(begin: int, stop: int, limit: int) -> str:
    """Return what is wrong with a span that lies outside of what it is cut from."""
    return f"its arrays contradict each other: {begin} to {stop} of {limit}"


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any] | Pieces], about: Mapping[str, str]) -> None:
    """Write arrays of 8-bit, 32-bit and 64-bit numbers and texts about them; a reader sees all of the file or none.

    Raises:
        OSError: the file can't be written.
    """
    # The widest first, so that each begins at a multiple of its elements' size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            header = _header({name: arrays[name] for name in names}, about)
            checksum = zlib.crc32(header)
            file.write(len(header).to_bytes(_PREFIX, "little") + header)
            for name in names:
                array = arrays[name]
                written = 0
                for piece in array.pieces if isinstance(array, Pieces) else [array]:
                    data = np.ascontiguousarray(piece, dtype=array.dtype).reshape(-1).view(np.uint8).data
                    checksum = zlib.crc32(data, checksum)
                    file.write(data)
                    written += len(piece)
                assert not isinstance(array, Pieces) or written == array.length, (name, written)
            file.seek(_PREFIX + header.index(_BEFORE) + len(_BEFORE))
            file.write(b"%08x" % checksum)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o666 & ~_umask())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _header(arrays: Mapping[str, NDArray[Any] | Pieces], about: Mapping[str, str]) -> bytes:
    kinds = {kind: name for name, kind in _KINDS.items()}
    header: dict[str, Any] = {_ABOUT: {_CHECKSUM: _UNKNOWN.decode(), **about}}
    begin = 0
    for name, array in arrays.items():
        shape = [array.length] if isinstance(array, Pieces) else list(array.shape)
        stop = begin + array.dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": kinds[array.dtype.str], "shape": shape, "data_offsets": [begin, stop]}
        begin = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PREFIX)
    assert len(text) <= _MAX_HEADER, len(text)
    return text


def check_arrays(path: Path) -> None:
    """Read all of a file that `read_arrays` reads, and compare it with its checksum; about a second a GiB.

    Raises:
        IndexFileError: it is not what was written.
        OSError: it can't be read.
    """
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        header = file.read(min(length, _MAX_HEADER))
        before, found, after = header.partition(_BEFORE)
        written, rest = after[: len(_UNKNOWN)], after[len(_UNKNOWN) :]
        checksum = zlib.crc32(before + found + _UNKNOWN + rest)
        while block := file.read(_AT_ONCE):
            checksum = zlib.crc32(block, checksum)
    if written != b"%08x" % checksum:
        got = repr(written.decode(errors="replace")) if found else "none"
        msg = f"its checksum is {checksum:08x}, and {got} is written in it"
        raise IndexFileError(msg)


def read_arrays(path: Path) -> StoredArrays:
    """Return what a file holds, of which only the header is read; see `check_arrays`.

    Raises:
        IndexFileError: it is damaged, or no such file; the message says what of it is wrong.
        OSError: it can't be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        begin = _PREFIX + length
        if length > _MAX_HEADER or begin > size:
            msg = f"its header of {length:,} bytes is longer than {min(_MAX_HEADER, max(size - _PREFIX, 0)):,}"
            raise IndexFileError(msg)
        try:
            header = parse_json(file.read(length))
        except ValueError as error:
            msg = f"its header is no JSON ({error})"
            raise IndexFileError(msg) from None
    if not isinstance(header, dict):
        msg = "its header is no JSON object"
        raise IndexFileError(msg)
    about = header.pop(_ABOUT, {})
    try:
        arrays = {name: _array(path, entry, begin=begin, size=size) for name, entry in header.items()}
        about = {str(name): str(text) for name, text in about.items() if name != _CHECKSUM}
        return StoredArrays(about=about, arrays=arrays)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"its header describes no arrays ({error!r})"
        raise IndexFileError(msg) from None


def _array(path: Path, entry: Mapping[str, Any], *, begin: int, size: int) -> NDArray[Any]:
    kind, shape = np.dtype(_KINDS[entry["dtype"]]), tuple(map(int, entry["shape"]))
    first, stop = map(int, entry["data_offsets"])
    bytes_ = kind.itemsize * int(np.prod(shape, dtype=object))
    if min(shape, default=0) < 0 or not 0 <= first <= stop <= size - begin or stop - first != bytes_:
        msg = f"an array of {bytes_} bytes at {first} to {stop} of {size - begin}"
        raise ValueError(msg)
    if not bytes_:
        return np.empty(shape, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", offset=begin + first, shape=shape)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
