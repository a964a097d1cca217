"""Files of Arrow's streaming format, as `datasets` saves them: record batches one after another, used where they lie.

Format: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format. Messages are small tables in
flatbuffers, of which a few numbers are read here; pyarrow checks the rest as it takes a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mimo_dataset_parquet._cells import TableError
from mimo_dataset_parquet._table import Group, checked_rows, checked_schema, read_exactly, size_of

MAX_MESSAGE = 1 << 24
"""Bytes of the description of a batch, its values not among them."""
_CONTINUES = b"\xff\xff\xff\xff"
_PREFIX = 8
_SCHEMA, _BATCH = 1, 3
"""Kinds of messages; Message.fbs' ``MessageHeader``."""
_MAPPED = 1 << 16
"""Bytes that a batch is counted as, whose values are pages of a mapped file."""


@attrs.frozen(kw_only=True, eq=False)
class ArrowTable:
    """One file. It is mapped for each batch that is read, so that no place in it is shared by threads or processes.

    Args:
        path: of the file.
        rows: of each batch.
        places: byte at which each batch begins.
        schema: of all of them.
    """

    path: Path
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    schema: pa.Schema

    def read(self, group: int, columns: Sequence[str]) -> Group:
        """Return some columns of a record batch; see `Table`."""
        try:
            with pa.memory_map(str(self.path)) as file:
                file.seek(int(self.places[group]))
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), self.schema)
            batch.validate()  # that no list or text can lie outside its buffers; values are checked as they are read
        except (pa.ArrowException, EOFError) as error:
            msg = f"record batch {group}: {error}"
            raise TableError(msg) from error
        if batch.num_rows != self.rows[group]:
            msg = f"record batch {group}: {batch.num_rows:,} rows of {self.rows[group]:,}"
            raise TableError(msg)
        return Group(columns={name: [batch.column(name)] for name in columns}, rows=batch.num_rows, bytes=_MAPPED)


def open_arrow(path: Path) -> ArrowTable:
    """Return a file, of which the beginning of each batch was read.

    Raises:
        TableError: it is no stream of Arrow, or a damaged one, or its batches are compressed.
        OSError: it can't be read.
    """
    schema, places, rows = None, [], []
    try:
        for place, message in _messages(path):
            kind, header = _header_of(message)
            if kind == _SCHEMA and schema is None:
                written = _CONTINUES + struct.pack("<i", len(message)) + message
                schema = checked_schema(pa.ipc.read_schema(pa.py_buffer(written)))
            elif kind == _BATCH and schema is not None:
                places.append(place)
                rows.append(header.number(0, "<q"))
                if header.offset(3) is not None:
                    msg = f"record batch {len(rows) - 1} that is compressed: save it without"
                    raise TableError(msg)
            else:
                msg = f"a message of kind {kind} at byte {place}, where record batches are expected"
                raise TableError(msg)
    except (pa.ArrowException, struct.error) as error:
        msg = f"a damaged message ({error})"
        raise TableError(msg) from error
    if schema is None:
        msg = "no stream of Arrow: it has no schema"
        raise TableError(msg)
    return ArrowTable(path=path, rows=checked_rows(rows), places=np.asarray(places, dtype=np.int64), schema=schema)


def _messages(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where each message begins, and its description."""
    size = size_of(path)
    place = 0
    with path.open("rb", buffering=0) as file:
        while place < size:
            file.seek(place)
            prefix = read_exactly(file, _PREFIX)
            length = int.from_bytes(prefix[4:], "little", signed=True)
            if prefix[:4] != _CONTINUES:
                msg = f"no stream of Arrow at byte {place}"
                raise TableError(msg)
            if not length:
                return
            if not 0 < length <= min(MAX_MESSAGE, size - place - _PREFIX):
                msg = f"a message of {length:,} bytes at byte {place}, of at most {MAX_MESSAGE:,} and {size:,} in all"
                raise TableError(msg)
            message = read_exactly(file, length)
            yield place, message
            body = _body_of(message)
            if not 0 <= body <= size - place - _PREFIX - length:
                msg = f"values of {body:,} bytes at byte {place}, in a file of {size:,}"
                raise TableError(msg)
            place += _PREFIX + length + body


@attrs.frozen
class _FlatTable:
    """A table in flatbuffers; `struct` refuses what lies outside the bytes."""

    data: bytes
    place: int

    def offset(self, field: int) -> int | None:
        """Return where a field's value lies, None if it is left out."""
        (back,) = struct.unpack_from("<i", self.data, self.place)
        fields = self.place - back
        (length,) = struct.unpack_from("<H", self.data, fields)
        entry = 4 + 2 * field
        if entry >= length:
            return None
        (offset,) = struct.unpack_from("<H", self.data, fields + entry)
        return self.place + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Return a number, 0 if it is left out."""
        place = self.offset(field)
        return 0 if place is None else int(struct.unpack_from(form, self.data, place)[0])

    def table(self, field: int) -> _FlatTable:
        """Return a table within this one."""
        place = self.offset(field)
        if place is None:
            msg = f"a message without field {field}"
            raise TableError(msg)
        return _FlatTable(self.data, place + struct.unpack_from("<I", self.data, place)[0])


def _message(data: bytes) -> _FlatTable:
    return _FlatTable(data, struct.unpack_from("<I", data)[0])


def _header_of(data: bytes) -> tuple[int, _FlatTable]:
    message = _message(data)
    return message.number(1, "<B"), message.table(2)


def _body_of(data: bytes) -> int:
    return _message(data).number(3, "<q")
