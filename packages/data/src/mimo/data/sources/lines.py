"""The lines of a jsonl file: where each begins, found by reading it once or kept in a file of offsets beside it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mimo.data.index import (
    IndexFileError,
    Origin,
    digest_of_file,
    index_place,
    read_arrays,
    write_arrays,
)
from mimo.data.sources.record import Record, RecordError, parse_record
from mimo.data.sources.record_dataset import path_inside

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LINE = 1 << 28
"""Bytes of a line that is parsed."""
BLOCK = 1 << 24
"""Bytes that are searched for line ends at once."""
SUFFIX = ".lines"
"""Of the file of offsets."""
_SPACE = np.frombuffer(b" \t\r\n\x0b\x0c", dtype=np.uint8)
"""What a blank line may begin with."""
_FORMAT = "mimo lines 1"


@attrs.frozen(kw_only=True, eq=False)
class Lines:
    """The lines of one file that hold something; paths of items are relative to its folder and stay inside it.

    Args:
        path: of the file.
        folder: that it lies in, links followed.
        index: see `Origin`.
        size: bytes of the file.
        starts: ``[N]`` byte at which each of them begins.
        stops: ``[N]`` byte after its end, the line's end included; None: each ends where the next begins.
        numbers: ``[N]`` of each in the file, from 1; None: no line is blank.
    """

    path: str
    folder: Path
    index: Path
    size: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64] | None = None
    numbers: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shards(self) -> Sequence[int]:
        """Return none: it is one file."""
        return ()

    def where(self, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self.path}:{self.number(sample)}"

    def number(self, sample: int) -> int:
        """Return the number of a sample's line in the file, from 1."""
        return sample + 1 if self.numbers is None else int(self.numbers[sample])

    def span(self, sample: int) -> tuple[int, int]:
        """Return the byte at which a sample's line begins, and the one after its end."""
        if self.stops is not None:
            return int(self.starts[sample]), int(self.stops[sample])
        has_next = sample + 1 < len(self.starts)
        return int(self.starts[sample]), int(self.starts[sample + 1]) if has_next else self.size

    def origin(self) -> Origin:
        """Return the file."""
        return Origin(name=self.path, index=self.index, digest=partial(digest_of_file, Path(self.path)))

    def read(self, sample: int) -> Record:
        """Return the record of a line."""
        return parse_record(self.bytes_of(sample), self.where(sample))

    def bytes_of(self, sample: int) -> bytes:
        """Return a line as it is.

        Raises:
            RecordError: it lies beyond the file, or is too long.
            OSError: it can't be read.
        """
        # Opened each time: a handle shared by forked processes would share its position. Not mapped either: a file
        # cut short while it is mapped ends the process by a signal, where reading it gives an error.
        start, stop = self.span(sample)
        if not 0 <= start <= stop <= self.size:
            got = f"bytes {start} to {stop} of {self.size}"
            raise RecordError(expected="a line inside the file", got=got, fix="Run `mimo data index` again.")
        if stop - start > MAX_LINE:
            raise RecordError(expected=f"a line of at most {MAX_LINE:,} bytes", got=f"one of {stop - start:,}")
        with Path(self.path).open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(stop - start)

    def item(self, sample: int, reference: str) -> Path:
        """Return the path of an item inside the file's folder."""
        return path_inside(self.folder, reference, where=self.where(sample), holder="file")


def find_lines(path: Path, index: str = "") -> Lines:
    """Return the lines of a file that hold something, which is read for it; a byte order mark of UTF-8 is left out.

    Args:
        path: of the file.
        index: a folder for indexes; empty: beside the file.

    Raises:
        OSError: it can't be read.
    """
    found = [np.zeros(1, dtype=np.int64)]
    doubtful: list[NDArray[np.int64]] = []
    size = 0
    with path.open("rb", buffering=0) as file:
        first_byte = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(0)
        while block := file.read(BLOCK):
            letters = np.frombuffer(block, dtype=np.uint8)
            begins = np.flatnonzero(letters == ord("\n")) + (size + 1)
            first = np.concatenate([found[-1][-1:], begins]) if found[-1][-1:] == size else begins
            first = first[first < size + len(block)]
            doubtful.append(first[np.isin(letters[first - size], _SPACE)])
            found += [begins] if len(begins) else []
            size += len(block)
        starts = np.concatenate(found)
        starts[0] = first_byte
        starts = starts[starts < size]
        doubtful += [starts[:1]] if first_byte else []
        blank = []
        for line in np.searchsorted(starts, np.concatenate([starts[:0], *doubtful])).tolist():
            stop = int(starts[line + 1]) if line + 1 < len(starts) else size
            file.seek(int(starts[line]))
            if not file.read(stop - int(starts[line])).strip():
                blank.append(line)
    stops = numbers = None
    if blank:
        numbers = np.delete(np.arange(1, len(starts) + 1, dtype=np.int64), blank)
        stops = np.delete(np.append(starts[1:], size), blank)
        starts = np.delete(starts, blank)
    return Lines(
        path=str(path),
        folder=path.parent.resolve(),
        index=index_place(str(path), index),
        size=size,
        starts=starts,
        stops=stops,
        numbers=numbers,
    )


def write_lines(path: Path, index: str = "") -> Path:
    """Read a file and write where its lines begin; return the path of what is written.

    Args:
        path: of the file.
        index: a folder for indexes; empty: beside the file.

    Raises:
        OSError: the one can't be read or the other can't be written.
    """
    digest = digest_of_file(path)  # before, so that what is written to it meanwhile makes the offsets stale
    lines = find_lines(path, index)
    target = lines.index.with_name(lines.index.name + SUFFIX)
    target.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(lines, name) for name in ("starts", "stops", "numbers")}
    about = {"format": _FORMAT, "data": digest, "size": str(lines.size)}
    write_arrays(target, {name: array for name, array in arrays.items() if array is not None}, about)
    return target


def open_lines(path: Path, index: str = "") -> Lines:
    """Return the lines of a file from the file of offsets that belongs to it, else by reading it.

    Args:
        path: of the file.
        index: a folder for indexes; empty: beside the file.

    Raises:
        IndexFileError: there are offsets, but damaged, or those of other data; the message says so.
        OSError: it can't be read.
    """
    place = index_place(str(path), index)
    offsets = place.with_name(place.name + SUFFIX)
    try:
        stored = read_arrays(offsets)
    except FileNotFoundError:
        return find_lines(path, index)
    starts, stops, numbers = (stored.arrays.get(name) for name in ("starts", "stops", "numbers"))
    is_whole = starts is not None and all(
        each is None or (each.dtype == np.int64 and each.shape == (len(starts),)) for each in (starts, stops, numbers)
    )
    if stored.about.get("format") != _FORMAT or starts is None or not is_whole:
        msg = "it holds no offsets of lines"
        raise IndexFileError(msg)
    if stored.about.get("data") != digest_of_file(path):
        msg = "the data have changed since it was made"
        raise IndexFileError(msg)
    return Lines(
        path=str(path),
        folder=path.parent.resolve(),
        index=place,
        size=path.stat().st_size,
        starts=starts,
        stops=stops,
        numbers=numbers,
    )
