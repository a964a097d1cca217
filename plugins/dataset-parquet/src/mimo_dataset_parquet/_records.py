"""Records in the rows of tables, whichever format their files have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import BoundedCache, Origin, Record, RecordError, digest_of_file, digest_of_text, path_inside
from mimo_dataset_parquet._cells import Row, TableError
from mimo_dataset_parquet._columns import SampleColumns
from mimo_dataset_parquet._rows import record_of
from mimo_dataset_parquet._table import Group, Table


@attrs.frozen(kw_only=True, eq=False)
class TableRecords:
    """The rows of some files, one file after another.

    Args:
        name: of all of them, for messages.
        index: see `Origin`.
        folder: that paths of items are relative to and stay inside of, links followed.
        tables: the files, in order.
        columns: that are read.
        prefix: what each text begins with.
        cache_bytes: of decoded groups that are kept.
    """

    name: str
    index: Path
    folder: Path
    tables: Sequence[Table]
    columns: SampleColumns
    prefix: str = ""
    cache_bytes: int = 1 << 28
    _groups: BoundedCache[Group] = attrs.field(init=False)
    _stops: NDArray[np.int64] = attrs.field(init=False)
    """``[number of groups]`` how many rows there are up to the end of each group."""
    _firsts: NDArray[np.int64] = attrs.field(init=False)
    """``[number of files]`` the first group of each file."""

    @_groups.default
    def _make_cache(self) -> BoundedCache[Group]:
        return BoundedCache(self.cache_bytes, lambda group: group.bytes)

    @_stops.default
    def _count_rows(self) -> NDArray[np.int64]:
        return np.cumsum(np.concatenate([np.zeros(0, np.int64), *(table.rows for table in self.tables)]))

    @_firsts.default
    def _count_groups(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(table.rows) for table in self.tables)])[:-1]

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    @property
    def shards(self) -> Sequence[int]:
        """Numbers of rows that are cheap to read one after another: those of each group, in order."""
        return [int(rows) for table in self.tables for rows in table.rows if rows]

    def where(self, sample: int) -> str:
        """Return the file and row of a sample, counted from 0 in its file."""
        table, _, _ = self._place(sample)
        first = self._firsts[table]
        return f"{self.tables[table].path}:row {sample - (int(self._stops[first - 1]) if first else 0)}"

    def origin(self) -> Origin:
        """Return the files."""
        return Origin(name=self.name, index=self.index, digest=self._digest, template=self._reading)

    def read(self, sample: int) -> Record:
        """Return the record of a row."""
        number, group, row = self._place(sample)
        table = self.tables[number]
        try:
            found = self._groups.get((number, group), partial(table.read, group, self.columns.names))
            reader = Row()
            values = {name: reader.value(*found.value_at(name, row)) for name in self.columns.names}
        except TableError as error:
            raise RecordError(expected="a row that can be read", got=str(error)) from error
        return record_of(
            {key: values[name] for key, name in self.columns.keys.items()},
            {modality: values[name] for modality, name in self.columns.items.items()},
            self.prefix,
            self.where(sample),
        )

    def item(self, sample: int, reference: str) -> Path:
        """Return the path of an item inside the folder."""
        return path_inside(self.folder, reference, where=self.where(sample), holder="table")

    def _place(self, sample: int) -> tuple[int, int, int]:
        """Return the number of a row's file, of its group in the file, and of the row in the group."""
        flat = int(np.searchsorted(self._stops, sample, side="right"))
        number = int(np.searchsorted(self._firsts, flat, side="right")) - 1
        begin = int(self._stops[flat - 1]) if flat else 0
        return number, flat - int(self._firsts[number]), sample - begin

    def _reading(self) -> str:
        return digest_of_text([attrs.asdict(self.columns), self.prefix])

    def _digest(self) -> str:
        return digest_of_text([[str(table.path.name), digest_of_file(table.path)] for table in self.tables])
