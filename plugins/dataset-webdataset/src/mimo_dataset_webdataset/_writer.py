"""Shards written from samples: the same samples give the same bytes, and a shard is there whole or not at all."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import attrs

from mimo.hooks import ConfigError, DataError
from mimo_dataset_webdataset._samples import MAX_MEMBER, is_never_read
from mimo_dataset_webdataset._table import TableBuilder
from mimo_dataset_webdataset._tar import BLOCK, MAX_NAME, Member, TarError, read_members

PATTERN = "train-{:06d}.tar"
MAX_BYTES = 1 << 28
MAX_SAMPLES = 1 << 16
_KEY = re.compile(r"(?:[^/]+/)*[^./]+")
_META = re.compile(r"__[^/]*__(/|\Z)")
_EXTENSION = re.compile(r"[^/.]+(\.[^/.]+)*")
_END = 2 * BLOCK
"""Bytes after the last member."""
_COPY = 1 << 20
_FOLDER_FIX = "Name another folder, or remove its shards to have them made again."


def write_shards(
    samples: Iterable[tuple[str, Mapping[str, bytes | Path]]],
    folder: Path,
    *,
    pattern: str = PATTERN,
    max_bytes: int = MAX_BYTES,
    max_samples: int = MAX_SAMPLES,
) -> list[Path]:
    """Write samples as shards and return the paths of these; started again with the same samples, it resumes.

    A shard that is there whole is compared with the samples instead of writing it again.

    Args:
        samples: the key of each and, by extension, what its members hold: bytes, or a file that is copied unchanged.
        folder: of the shards, made if need be.
        pattern: their names, with a place for the number.
        max_bytes: of a shard, headers and padding included, unless its only sample has more.
        max_samples: of a shard.

    Raises:
        DataError: a sample has no fit key or extensions, or an item can't be read.
        ConfigError: the folder holds other shards of these names, or can't be written.
    """
    if pattern.format(0) == pattern.format(1) or "/" in pattern:
        raise ConfigError("pattern", expected="a name with a place for the number, {:06d}", got=repr(pattern))
    paths: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for group in _groups(samples, max_bytes, max_samples):
            path = folder / pattern.format(len(paths))
            if path.exists():
                _compare(path, group)
            else:
                _write(path, group)
            paths.append(path)
    except OSError as error:
        raise ConfigError(
            "the folder of shards", expected="one that can be written", got=f"{str(folder)!r} ({error})"
        ) from error
    beyond = folder / pattern.format(len(paths))
    if beyond.exists():
        raise ConfigError(str(folder), expected=f"{len(paths):,} shards", got=f"also {beyond.name}", fix=_FOLDER_FIX)
    return paths


@attrs.frozen(kw_only=True)
class _Entry:
    """A member to be written."""

    key: str
    name: str
    size: int
    content: bytes | Path


def _groups(
    samples: Iterable[tuple[str, Mapping[str, bytes | Path]]], max_bytes: int, max_samples: int
) -> Iterator[Iterator[_Entry]]:
    """Yield the members of each shard; each must be read to its end before the next."""
    source = (_entries(key, members) for key, members in samples)
    first = next(source, None)
    while first is not None:
        rest: list[list[_Entry]] = []
        yield _shard(first, source, rest, max_bytes=max_bytes, max_samples=max_samples)
        first = rest[0] if rest else None


def _shard(
    first: list[_Entry], source: Iterator[list[_Entry]], rest: list[list[_Entry]], *, max_bytes: int, max_samples: int
) -> Iterator[_Entry]:
    """Yield the members of one shard, and put the first sample of the next one into ``rest``."""
    bytes_, count = _END + _bytes(first), 1
    yield from first
    for entries in source:
        bytes_, count = bytes_ + _bytes(entries), count + 1
        if bytes_ > max_bytes or count > max_samples:
            rest.append(entries)
            return
        yield from entries


def _bytes(entries: list[_Entry]) -> int:
    return sum(len(_header(entry)) + entry.size + -entry.size % BLOCK for entry in entries)


def _header(entry: _Entry) -> bytes:
    header = tarfile.TarInfo(entry.name)  # whose time and owner are 0
    header.size = entry.size
    return header.tobuf(tarfile.PAX_FORMAT, "utf-8")


def _entries(key: str, members: Mapping[str, bytes | Path]) -> list[_Entry]:
    is_fit = _KEY.fullmatch(key) and not _META.match(key) and ".." not in key.split("/") and "\0" not in key
    if not is_fit:
        raise DataError(
            key, expected="keys without a dot in their last part, a / before them or __ around them", got=repr(key)
        )
    if not members:
        raise DataError(key, expected="at least one member", got="none")
    entries = []
    for extension, content in sorted(members.items()):
        name = f"{key}.{extension}"
        if not _EXTENSION.fullmatch(extension) or extension != extension.lower() or is_never_read(extension):
            raise DataError(key, expected="an extension in small letters that can be read again", got=repr(extension))
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(repr(key), expected="names in UTF-8", got=repr(name), fix="Rename the file.") from None
        if len(name.encode()) > MAX_NAME:
            raise DataError(key, expected=f"names of at most {MAX_NAME:,} bytes", got=f"{len(name.encode()):,}")
        try:
            size = content.stat().st_size if isinstance(content, Path) else len(content)
        except OSError as error:
            raise DataError(key, expected="an item that can be read", got=str(error)) from error
        if size > MAX_MEMBER:
            raise DataError(key, expected=f"items of at most {MAX_MEMBER:,} bytes", got=f"{name!r} of {size:,}")
        entries.append(_Entry(key=key, name=name, size=size, content=content))
    return entries


def _write(path: Path, entries: Iterable[_Entry]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    builder = TableBuilder()
    try:
        with partial.open("wb") as file:
            try:
                builder.add_shard(_written(file, entries))
            except TarError as error:
                raise DataError(path.name, expected="each key once", got=str(error)) from None
            file.write(bytes(_END))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _written(file: BinaryIO, entries: Iterable[_Entry]) -> Iterator[Member]:
    for entry in entries:
        file.write(_header(entry))
        start = file.tell()
        _copy(entry, file)
        file.write(bytes(-entry.size % BLOCK))
        yield Member(entry.name, start, entry.size)


def _copy(entry: _Entry, file: BinaryIO) -> None:
    if isinstance(entry.content, bytes):
        file.write(entry.content)
        return
    done = 0
    try:
        source = entry.content.open("rb")
    except OSError as error:
        raise DataError(entry.key, expected="an item that can be read", got=str(error)) from error
    with source:
        while chunk := source.read(min(_COPY, entry.size - done)):
            file.write(chunk)
            done += len(chunk)
    if done != entry.size:
        raise DataError(entry.key, expected=f"{entry.size:,} bytes in {entry.name!r}", got=f"{done:,}: it was changed")


def _compare(path: Path, entries: Iterable[_Entry]) -> None:
    try:
        with path.open("rb") as file:
            members = list(read_members(file, path.stat().st_size))
            is_same = all(
                entry and member and _is_same(file, member, entry) for entry, member in zip_longest(entries, members)
            )
    except TarError as error:
        raise ConfigError(
            str(path), expected="a shard that was written here", got=str(error), fix=_FOLDER_FIX
        ) from None
    if not is_same:
        raise ConfigError(str(path), expected="the same samples as before", got="other ones", fix=_FOLDER_FIX)


def _is_same(file: BinaryIO, member: Member, entry: _Entry) -> bool:
    """Return whether a shard's member has the name and all bytes of an entry."""
    if (member.name, member.size) != (entry.name, entry.size):
        return False
    with io.BytesIO(entry.content) if isinstance(entry.content, bytes) else entry.content.open("rb") as source:
        for place in range(0, member.size, _COPY):
            file.seek(member.start + place)
            if file.read(min(_COPY, member.size - place)) != source.read(_COPY):
                return False
    return True
