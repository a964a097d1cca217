"""What is known of shards once their headers were read: where each member of each sample lies, as flat arrays.

Members form samples as the WebDataset library groups them: consecutive files with one name up to the first dot of its
last part are one sample, whose key that is; the rest of the name, in small letters, says what a member is. Names that
begin with a dot, or ``__so__``, belong to no sample.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mimo_dataset_webdataset._tar import Member, TarError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EXTENSIONS = 4096
"""Different extensions in a data set, so that a sample has no more members either."""
_META = re.compile(r"__[^/]*__(/|\Z)", re.DOTALL)


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, None if it belongs to no sample.

    The library's pattern is ``((?:.*/|)[^.]+)[.]([^/]*)``, which takes time with the square of a name's length.
    """
    if _META.match(name):
        return None
    folder, slash, last = name.rpartition("/")
    first, dot, extension = last.partition(".")
    is_sample = dot and (first or (slash and "." not in folder.rpartition("/")[2]))
    return (folder + slash + first, extension) if is_sample else None


@attrs.frozen(kw_only=True, eq=False)
class Texts:
    """Many short texts in one array.

    Args:
        letters: ``[B]`` their bytes in UTF-8, one text after the other.
        stops: ``[N]`` after the end of each.
    """

    letters: NDArray[np.uint8]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.stops)

    def __getitem__(self, index: int) -> str:
        begin = int(self.stops[index - 1]) if index else 0
        return bytes(self.letters[begin : int(self.stops[index])]).decode(errors="replace")

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Return texts in one array."""
        letters, stops = bytearray(), array("q")
        for text in texts:
            letters += text.encode()
            stops.append(len(letters))
        return cls(letters=np.frombuffer(bytes(letters), dtype=np.uint8), stops=np.array(stops, dtype=np.int64))


@attrs.frozen(kw_only=True, eq=False)
class Table:
    """The samples of shards, shard after shard.

    Args:
        samples: ``[K]`` of each shard.
        keys: of the N samples.
        members: ``[N + 1]`` the first member of each sample, and the end of the last one's.
        starts: ``[M]`` byte of its shard at which a member's content begins.
        sizes: ``[M]`` bytes of a member.
        extensions: ``[M]`` of each member, an index of ``names``.
        names: the different extensions.
    """

    samples: NDArray[np.int64]
    keys: Texts
    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    extensions: NDArray[np.int32]
    names: tuple[str, ...]

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """``[K]`` number of the sample after each shard's last one."""
        found: NDArray[np.int64] = np.cumsum(self.samples)
        return found

    def __len__(self) -> int:
        return len(self.keys)

    def shard(self, sample: int) -> int:
        """Return the shard that holds a sample."""
        return int(np.searchsorted(self.stops, sample, side="right"))

    def of_sample(self, sample: int) -> list[Member]:
        """Return the members of a sample in the order of their extensions, by which each is named.

        Raises:
            ValueError: the table is damaged.
        """
        first, stop = int(self.members[sample]), int(self.members[sample + 1])
        numbers = self.extensions[first:stop]
        if not 0 <= first < stop <= first + MAX_EXTENSIONS or not (
            len(numbers) == stop - first and 0 <= int(numbers.min()) <= int(numbers.max()) < len(self.names)
        ):
            msg = "members that its index misplaces"
            raise ValueError(msg)
        rows = range(first, stop)
        found = [Member(self.names[self.extensions[row]], int(self.starts[row]), int(self.sizes[row])) for row in rows]
        return sorted(found, key=lambda member: member.name)


class TableBuilder:
    """Takes the members of shards, one shard after the other; it holds about 30 bytes a member besides keys."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._keys, self._key_stops = bytearray(), array("q")
        self._members = array("q")
        self._starts, self._sizes, self._extensions = array("q"), array("q"), array("i")
        self._names: dict[str, int] = {}

    def add_shard(self, members: Iterable[Member]) -> None:
        """Add the members of a shard; samples never span shards.

        Raises:
            TarError: a key or an extension comes twice, or there are too many different ones.
        """
        seen: set[str] = set()
        key, extensions = None, set[str]()
        for member in members:
            parts = split_name(member.name)
            if parts is None:
                continue
            extension = parts[1].lower()
            if parts[0] != key:
                key, extensions = parts[0], set()
                if key in seen:
                    msg = f"two samples with the key {key!r}: the members of a sample must follow each other"
                    raise TarError(msg)
                seen.add(key)
                self._keys += key.encode()
                self._key_stops.append(len(self._keys))
                self._members.append(len(self._starts))
            if extension in extensions:
                msg = f"two members {member.name!r}"
                raise TarError(msg)
            extensions.add(extension)
            self._extensions.append(self._names.setdefault(extension, len(self._names)))
            if len(self._names) > MAX_EXTENSIONS:
                msg = f"more than {MAX_EXTENSIONS:,} different extensions, the last one that of {member.name!r}"
                raise TarError(msg)
            self._starts.append(member.start)
            self._sizes.append(member.size)
        self._samples.append(len(seen))

    def table(self) -> Table:
        """Return what was added."""
        return Table(
            samples=np.array(self._samples, dtype=np.int64),
            keys=Texts(
                letters=np.frombuffer(bytes(self._keys), dtype=np.uint8),
                stops=np.array(self._key_stops, dtype=np.int64),
            ),
            members=np.array([*self._members, len(self._starts)], dtype=np.int64),
            starts=np.array(self._starts, dtype=np.int64),
            sizes=np.array(self._sizes, dtype=np.int64),
            extensions=np.array(self._extensions, dtype=np.int32),
            names=tuple(self._names),
        )
