"""The index of shards: where everything lies, read from headers once, and what shows that shards changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np

from mimo.data import IndexFileError, digest_of_file, digest_of_text, read_arrays, write_arrays
from mimo.hooks import ConfigError, DataError
from mimo_dataset_webdataset._shards import Shard, Shards
from mimo_dataset_webdataset._table import Table, TableBuilder, Texts
from mimo_dataset_webdataset._tar import TarError, read_members

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX = ".shards"
_FORMAT = "1"
REINDEX = "Run mimo data index FILE with the file of settings again."
_LETTERS = ("shards", "marks", "keys", "names")
_NUMBERS = ("sizes", "times", "samples", "members", "starts", "member_sizes")


@attrs.frozen(kw_only=True)
class Facts:
    """What a shard is known by.

    Args:
        size: in bytes.
        mark: digest of a file here, ETag or time of one elsewhere.
        time: of its last change in nanoseconds, 0 for one elsewhere.
    """

    size: int
    mark: str
    time: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Known:
    """Where everything lies in some shards.

    Args:
        table: of samples and members.
        facts: returns those of a shard by its number.
    """

    table: Table
    facts: Callable[[int], Facts]

    def digest(self, shards: Sequence[Shard]) -> str:
        """Return a text that changes when a shard does."""
        facts = map(self.facts, range(len(shards)))
        return digest_of_text([[shard.name, each.mark, each.size] for shard, each in zip(shards, facts, strict=True)])


def local_facts(shard: Shard) -> Facts:
    """Return the facts of a file, of which up to 4 MiB are read."""
    path = Path(shard.address)
    status = path.stat()
    return Facts(size=status.st_size, mark=digest_of_file(path), time=status.st_mtime_ns)


def read_table(shards: Shards, opened: Callable[[int], AbstractContextManager[BinaryIO]]) -> Table:
    """Return where everything lies, read from the headers of each shard.

    Args:
        shards: which.
        opened: opens one by its number.

    Raises:
        ConfigError: one is no tar of samples, by the setting that names it.
        DataError: one can't be read.
    """
    builder = TableBuilder()
    for number, shard in enumerate(shards.shards):
        try:
            with opened(number) as file:
                builder.add_shard(read_members(file, file.seek(0, 2)))
        except TarError as error:
            got = f"{shard.identity!r}, {error}"
            raise ConfigError(shards.setting, expected="tars of samples", got=got) from None
        except OSError as error:
            raise DataError(shard.identity, expected="a readable tar", got=str(error)) from error
    return builder.table()


def write_index(shards: Shards, known: Known) -> Path:
    """Write the index and return its path.

    Raises:
        ConfigError: it can't be written.
    """
    facts = [known.facts(number) for number in range(len(shards.shards))]
    texts = {
        "shards": Texts.of(shard.identity for shard in shards.shards),
        "marks": Texts.of(each.mark for each in facts),
        "keys": known.table.keys,
        "names": Texts.of(known.table.names),
    }
    arrays: dict[str, NDArray[Any]] = {name: text.letters for name, text in texts.items()}
    arrays |= {f"{name}_stops": text.stops for name, text in texts.items()}
    arrays |= {
        "sizes": np.array([each.size for each in facts], dtype=np.int64),
        "times": np.array([each.time for each in facts], dtype=np.int64),
        "samples": known.table.samples,
        "members": known.table.members,
        "starts": known.table.starts,
        "member_sizes": known.table.sizes,
        "extensions": known.table.extensions,
    }
    path = index_path(shards)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, {"format": _FORMAT})
    except OSError as error:
        raise ConfigError(
            "data.index",
            expected="a folder that can be written",
            got=f"{str(path.parent)!r} ({error})",
            fix='Set data.index = "index".',
        ) from error
    return path


def index_path(shards: Shards) -> Path:
    """Return where the index of shards is kept."""
    return shards.index.with_name(shards.index.name + SUFFIX)


def read_index(shards: Shards) -> Known | None:
    """Return what the index says, None if there is none.

    Raises:
        ConfigError: it is damaged, or of other shards than there are.
    """
    path = index_path(shards)
    if not path.is_file():
        return None
    try:
        stored = read_arrays(path)
        if stored.about.get("format") != _FORMAT:
            msg = f"its format is {stored.about.get('format')!r}, not {_FORMAT!r}"
            raise IndexFileError(msg)
        names, marks, sizes, times, table = _parse(stored.arrays)
    except (OSError, ValueError) as error:
        raise ConfigError(
            shards.setting, expected=f"a sound index in {str(path)!r}", got=f"one of which {error}", fix=REINDEX
        ) from error

    def facts(number: int) -> Facts:
        return Facts(size=int(sizes[number]), mark=marks[number], time=int(times[number]))

    if changed := _changed(shards.shards, names, facts):
        raise ConfigError(
            shards.setting,
            expected=f"the shards of which the index {str(path)!r} was made",
            got=changed,
            fix=REINDEX,
        )
    return Known(table=table, facts=facts)


def _changed(shards: Sequence[Shard], names: Texts, facts: Callable[[int], Facts]) -> str:
    """Return what differs from the index, empty if nothing does; of shards elsewhere only names are looked at."""
    if len(names) != len(shards):
        return f"{len(shards):,} shards, not {len(names):,}"
    for number, shard in enumerate(shards):
        if names[number] != shard.identity:
            return f"{shard.identity!r} in the place of {names[number]!r}"
        if not shard.is_local:
            continue
        status, before = Path(shard.address).stat(), facts(number)
        # As a digest reads 4 MiB of each shard, a file of the same size and time is believed to be the same.
        is_same = (status.st_size, status.st_mtime_ns) == (before.size, before.time)
        if not is_same and local_facts(shard).mark != before.mark:
            return f"another {shard.identity!r}"
    return ""


def _parse(
    arrays: Mapping[str, NDArray[Any]],
) -> tuple[Texts, Texts, NDArray[np.int64], NDArray[np.int64], Table]:
    """Return what the arrays hold; only their ends are looked at, as pages of large ones are read when used."""
    wanted: dict[str, type[np.generic]] = dict.fromkeys(_LETTERS, np.uint8)
    wanted |= dict.fromkeys((*(f"{name}_stops" for name in _LETTERS), *_NUMBERS), np.int64)
    wanted["extensions"] = np.int32
    for name, kind in wanted.items():
        if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != 1:
            msg = f"the array {name!r} is missing or of another kind"
            raise ValueError(msg)
    texts = {name: Texts(letters=arrays[name], stops=arrays[f"{name}_stops"]) for name in _LETTERS}
    table = Table(
        samples=arrays["samples"],
        keys=texts["keys"],
        members=arrays["members"],
        starts=arrays["starts"],
        sizes=arrays["member_sizes"],
        extensions=arrays["extensions"],
        names=tuple(texts["names"][number] for number in range(len(texts["names"]))),
    )
    shards = len(texts["shards"])
    counts = {len(arrays["samples"]), len(arrays["sizes"]), len(arrays["times"]), len(texts["marks"])}
    members = {len(table.starts), len(table.sizes), len(table.extensions), int(table.members[-1])}
    is_sound = counts == {shards} and len(members) == 1 and len(table.members) == len(table) + 1
    if not is_sound or (table.samples < 0).any() or int(table.samples.sum()) != len(table):
        msg = "the arrays don't fit each other"
        raise ValueError(msg)
    return texts["shards"], texts["marks"], arrays["sizes"], arrays["times"], table
