"""Where the members of a tar lie, read from header to header: nothing is extracted, and no header is believed.

The subset of ustar, GNU and pax that shards are written in; what else a tar may hold is refused or, as folders are,
left out. Every size is checked against the file before it is followed, and everything that is read is bounded.
The formats: POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import attrs

BLOCK = 512
"""Bytes of a header; members begin at multiples of it."""
MAX_MEMBERS = 1 << 22
"""Headers of one shard."""
MAX_NAME = 1024
"""Bytes of a member's name."""
_MAX_EXTENDED = 1 << 16
"""Bytes of a header that extends the next one."""
_MAX_EXTENSIONS = 4
"""Such headers before a member."""
_MAX_PADDING = 1 << 20
"""Bytes of zeros after the end; programs fill up to blocks of their own, 10,240 bytes by default."""
_FILES = frozenset(b"0\x007")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OTHERS = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a device",
    ord("4"): "a device",
    ord("6"): "a named pipe",
    ord("K"): "a link",
    ord("S"): "a sparse file",
    ord("M"): "a part of a file that begins in another archive",
}
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
_LENGTH = re.compile(rb"([0-9]{1,5}) ")
_NEGATIVE = 0xFF
_BINARY = 0x80


class TarError(ValueError):
    """What is wrong with an archive, and where in it; the message goes on from "got"."""


@attrs.frozen
class Member:
    """A file within a tar: its name, the byte at which its content begins, and how many there are."""

    name: str
    start: int
    size: int


@attrs.define
class _Extension:
    """What headers before a member's own say of it."""

    name: bytes | None = None
    size: int | None = None
    headers: int = 0


def read_members(file: BinaryIO, size: int) -> Iterator[Member]:
    """Yield the regular files of a tar of ``size`` bytes in order; folders are left out.

    Raises:
        TarError: it is damaged, cut, compressed, or holds what a shard doesn't.
        OSError: it can't be read.
    """
    place, extension = 0, _Extension()
    for _ in range(MAX_MEMBERS):
        header = _read(file, place, BLOCK)
        if len(header) < BLOCK:
            msg = f"an archive of {size:,} bytes that was cut: it has no end"
            raise TarError(msg)
        if not any(header):
            if extension.headers:
                msg = f"an end at byte {place:,}, after a header that announces a member"
                raise TarError(msg)
            _check_end(file, place, size)
            return
        _check_sum(header, place)
        kind = header[156]
        length = _number(header[124:136], place)
        start = place + BLOCK
        if kind in b"xgL":
            _extend(extension, kind, _announced(file, start, length, size, place), place)
            place = start + _padded(length)
            continue
        name = _name(header, extension, place)
        length = _length(length, extension, name)
        if length > size - start:
            msg = f"a member {name!r} of {length:,} bytes of which {max(size - start, 0):,} are there: it was cut"
            raise TarError(msg)
        is_folder = kind == ord("5") or (kind in _FILES and name.endswith("/"))
        if is_folder and length:  # programs differ in whether they skip it
            msg = f"a folder {name!r} of {length:,} bytes"
            raise TarError(msg)
        if kind in _FILES and not is_folder:
            yield Member(name, start, length)
        elif not is_folder:
            noun = _OTHERS.get(kind, f"a member of the unknown type {chr(kind)!r}")
            msg = (
                f"{noun} {name!r}; shards hold files (GNU tar's --dereference --hard-dereference store these as files)"
            )
            raise TarError(msg)
        place, extension = start + _padded(length), _Extension()
    msg = f"more than {MAX_MEMBERS:,} members"
    raise TarError(msg)


def _read(file: BinaryIO, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _check_sum(header: bytes, place: int) -> None:
    stored = header[148:156].strip(b" \0")
    found = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    # Some programs sum bytes with a sign.
    if _is_number(stored, found) or _is_number(
        stored, found - 256 * sum(byte >= _BINARY for byte in header[:148] + header[156:])
    ):
        return
    if place == 0:
        for magic, program in _COMPRESSED.items():
            if header.startswith(magic):
                msg = f"one that {program} compressed, of which no member can be read alone: store it as plain tar"
                raise TarError(msg)
    msg = f"a header at byte {place:,} whose checksum is wrong: no tar, or a damaged one"
    raise TarError(msg)


def _is_number(digits: bytes, number: int) -> bool:
    return digits.lstrip(b"0") == b"%o" % number


def _number(field: bytes, place: int) -> int:
    """Return a number as octal digits have it, or as GNU's 256-based form, which a first bit of 1 shows."""
    if field[0] == _NEGATIVE:
        msg = f"a negative number in the header at byte {place:,}"
        raise TarError(msg)
    if field[0] & _BINARY:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        msg = f"the number {field!r} in the header at byte {place:,}"
        raise TarError(msg)
    return int(digits[1] or b"0", 8)


def _announced(file: BinaryIO, start: int, length: int, size: int, place: int) -> bytes:
    if length > min(_MAX_EXTENDED, size - start):
        msg = f"a header at byte {place:,} with {length:,} bytes about a member, more than {_MAX_EXTENDED:,} or its end"
        raise TarError(msg)
    return _read(file, start, length)


def _extend(extension: _Extension, kind: int, content: bytes, place: int) -> None:
    extension.headers += 1
    if extension.headers > _MAX_EXTENSIONS:
        msg = f"more than {_MAX_EXTENSIONS} headers about one member, at byte {place:,}"
        raise TarError(msg)
    if kind == ord("L"):
        extension.name = content.partition(b"\0")[0]
        return
    for key, value in _pax(content, place):
        if kind == ord("g") and key in (b"path", b"size"):
            msg = f"a global header at byte {place:,} that names all members"
            raise TarError(msg)
        if key.startswith(b"GNU.sparse"):
            msg = f"a sparse file at byte {place:,}; write the archive without --sparse"
            raise TarError(msg)
        if key == b"path":
            extension.name = value
        elif key == b"size":
            if not re.fullmatch(rb"[0-9]{1,19}", value):
                msg = f"the size {value[:40]!r} at byte {place:,}"
                raise TarError(msg)
            extension.size = int(value)


def _pax(content: bytes, place: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records ``30 key=value`` of an extended header; 30 counts the record whole, with its line's end."""
    while content.strip(b"\0"):
        length = _LENGTH.match(content)
        record = content[: int(length[1])] if length else b""
        if length is None or len(record) < int(length[1]) or not record.endswith(b"\n") or b"=" not in record:
            msg = f"an extended header at byte {place:,} that can't be read"
            raise TarError(msg)
        key, _, value = record[length.end() : -1].partition(b"=")
        yield key, value
        content = content[len(record) :]


def _name(header: bytes, extension: _Extension, place: int) -> str:
    raw = extension.name
    if raw is None:
        raw = header[:100].partition(b"\0")[0]
        prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
        raw = prefix + b"/" + raw if prefix else raw
    if not 0 < len(raw) <= MAX_NAME:
        msg = f"a member at byte {place:,} with a name of {len(raw):,} bytes, not of 1 to {MAX_NAME:,}"
        raise TarError(msg)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        msg = f"a member at byte {place:,} whose name {raw[:40]!r} is no UTF-8"
        raise TarError(msg) from None
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        msg = f"a member {name!r}, which lies outside of the archive"
        raise TarError(msg)
    return name


def _length(length: int, extension: _Extension, name: str) -> int:
    """Return the size of a member; a header that says another one than that before it is read otherwise elsewhere."""
    if extension.size is None:
        return length
    if length not in (0, extension.size):
        msg = f"two sizes of member {name!r}, {length:,} and {extension.size:,} bytes"
        raise TarError(msg)
    return extension.size


def _check_end(file: BinaryIO, place: int, size: int) -> None:
    if size - place < 2 * BLOCK:
        msg = f"an archive of {size:,} bytes that was cut within its end"
        raise TarError(msg)
    rest = size - place
    if rest > _MAX_PADDING or any(_read(file, place, rest)):
        msg = f"{rest:,} bytes after its end at byte {place:,}: archives that were joined are to be kept as shards"
        raise TarError(msg)
