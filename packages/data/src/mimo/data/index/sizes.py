"""Lengths of samples and sizes of their items as flat arrays: known without reading a sample.

N samples, M items, K numbers of their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.index.store import (
    IndexFileError,
    StoredArrays,
    are_offsets,
    contradiction,
    joined_blocks,
    span_of,
    write_arrays,
)
from mimo.hooks import ItemRole

_Name = TypeVar("_Name", bound=str)

FORMAT = "mimo sizes 1"
_SAMPLES: Mapping[str, str] = {
    **dict.fromkeys(("tokens", "ids", "targets"), "<i4"),
    "weight": "<f8",
    **dict.fromkeys(("cut", "broken"), "|u1"),
}
"""Arrays ``[N]`` and their kinds."""
_COUNTS = ("rows", "asked", "made_from", "losses")
_ITEMS: Mapping[str, str] = {
    "modality": "|u1",
    "number": "<i4",
    **dict.fromkeys(_COUNTS, "<i4"),
    **dict.fromkeys(("kept", "role"), "|u1"),
}
"""Arrays ``[M]``."""
_LATER = ("role", "asked", "made_from", "losses")
"""Those that a file from when nothing was made lacks."""
_OFFSETS = ("first_item", "first_size")
_KINDS: Mapping[str, str] = {**_SAMPLES, **_ITEMS, **dict.fromkeys((*_OFFSETS, "size"), "<i8")}
_MAX_MODALITIES = 256
_ROLES: tuple[ItemRole, ...] = get_args(ItemRole)
"""Which ``role`` counts from 0."""
_BOTH = _ROLES.index("both")
_ALL = slice(None)


@attrs.frozen(kw_only=True)
class ItemSize:
    """One item.

    Args:
        modality: whose encoder reads it, or whose generator makes it.
        number: its number in its sample, as in `ItemInfo.index`.
        size: as its encoder or generator measures it.
        rows: that its encoder makes of it, 0 if it isn't read.
        kept: whether it lies in its sample as cut.
        role: what the model does with it, as in `ItemInfo.role`.
        asked: rows of the placeholder that calls for it, 0 if it isn't made.
        made_from: of one that is made, from how many rows of the language model; 0 where it isn't kept.
        losses: likewise, how many its generator has of it.
    """

    modality: str
    number: int
    size: tuple[int, ...]
    rows: int
    kept: bool = True
    role: ItemRole = ""
    asked: int = 0
    made_from: int = 0
    losses: int = 0


@attrs.frozen(kw_only=True)
class SampleSize:
    """One sample as it is laid out.

    Args:
        tokens: rows after cutting.
        ids: before: of a text far longer than the limit no more than show that it is.
        targets: rows that are learnt.
        weight: sum of their weights.
        cut: whether something was cut off.
        broken: whether it can't be read; it is then one token of weight 0.
        items: in the dataset's order.
    """

    tokens: int
    ids: int
    targets: int
    weight: float
    cut: bool = False
    broken: bool = False
    items: tuple[ItemSize, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class SampleSizes:
    """Sizes of N samples with M items; the items of sample ``n`` are ``first_item[n] … first_item[n + 1] - 1``.

    Args:
        modalities: names, which ``modality`` counts from 0.
        tokens, ids, targets, weight, cut, broken: ``[N]``, see `SampleSize`.
        first_item: ``[N + 1]``, from 0 to M.
        modality, number, rows, asked, made_from, losses, kept, role: ``[M]``, see `ItemSize`.
        first_size: ``[M + 1]``, from 0 to K.
        size: ``[K]``; that of item ``m`` is ``first_size[m] … first_size[m + 1] - 1``.
    """

    modalities: tuple[str, ...]
    tokens: NDArray[np.int32]
    ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    weight: NDArray[np.float64]
    cut: NDArray[np.uint8]
    broken: NDArray[np.uint8]
    first_item: NDArray[np.int64]
    modality: NDArray[np.uint8]
    number: NDArray[np.int32]
    rows: NDArray[np.int32]
    asked: NDArray[np.int32]
    made_from: NDArray[np.int32]
    losses: NDArray[np.int32]
    kept: NDArray[np.uint8]
    role: NDArray[np.uint8]
    first_size: NDArray[np.int64]
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, modalities: Sequence[str], samples: Sequence[SampleSize]) -> SampleSizes:
        """Return the arrays of samples; all their modalities are among those that are given."""
        assert len(modalities) <= _MAX_MODALITIES, len(modalities)
        items = [item for sample in samples for item in sample.items]
        arrays: dict[str, Any] = {
            name: np.array([getattr(sample, name) for sample in samples], dtype=kind) for name, kind in _SAMPLES.items()
        }
        numbered: Mapping[str, Sequence[str]] = {"modality": modalities, "role": _ROLES}
        for name, kind in _ITEMS.items():
            values = [getattr(item, name) for item in items]
            values = [numbered[name].index(value) for value in values] if name in numbered else values
            arrays[name] = np.array(values, dtype=kind)
        return cls(
            modalities=tuple(modalities),
            **arrays,
            first_item=np.cumsum([0, *(len(sample.items) for sample in samples)], dtype=np.int64),
            first_size=np.cumsum([0, *(len(item.size) for item in items)], dtype=np.int64),
            size=np.array([number for item in items for number in item.size], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[SampleSizes]) -> SampleSizes:
        """Return the arrays of samples one part after another; at least one part."""
        modalities = tuple(dict.fromkeys(name for part in parts for name in part.modalities))
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _KINDS if name not in _OFFSETS
        }
        arrays["modality"] = np.concatenate(
            [
                np.array([modalities.index(name) for name in part.modalities], dtype=np.uint8)[part.modality]
                for part in parts
            ]
        )
        for name in _OFFSETS:
            steps = [np.diff(getattr(part, name)) for part in parts]
            arrays[name] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(steps))])
        return cls(modalities=modalities, **arrays)

    def __getitem__(self, sample: int) -> SampleSize:
        """Return one sample.

        Raises:
            IndexFileError: the arrays contradict each other.
        """
        values: dict[str, Any] = {name: getattr(self, name)[sample].item() for name in _SAMPLES}
        values |= {name: bool(values[name]) for name in ("cut", "broken")}
        return SampleSize(**values, items=self.items_of(sample))

    def items_of(self, sample: int) -> tuple[ItemSize, ...]:
        """Return the items of one sample; raises as its sizes do."""
        begin, stop = span_of(self.first_item, sample, len(self.modality))
        return tuple(self.item(item) for item in range(begin, stop))

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes:
        """Return the sizes of some samples, in the order in which they are given.

        Raises:
            IndexFileError: the arrays contradict each other.
        """
        chosen = np.asarray(samples, dtype=np.int64)
        first_item, items = _spread(self.first_item, chosen, len(self.modality))
        first_size, sizes = _spread(self.first_size, items, len(self.size))
        return SampleSizes(
            modalities=self.modalities,
            **{name: np.asarray(getattr(self, name)[chosen]) for name in _SAMPLES},
            **{name: np.asarray(getattr(self, name)[items]) for name in _ITEMS},
            first_item=first_item,
            first_size=first_size,
            size=np.asarray(self.size[sizes]),
        )

    def item(self, item: int) -> ItemSize:
        """Return one item by its number among all.

        Raises:
            IndexFileError: the arrays contradict each other.
        """
        begin, stop = span_of(self.first_size, item, len(self.size))
        return ItemSize(
            modality=self._named("modality", item, self.modalities),
            role=self._named("role", item, _ROLES),
            number=int(self.number[item]),
            size=tuple(self.size[begin:stop].tolist()),
            kept=bool(self.kept[item]),
            **{name: int(getattr(self, name)[item]) for name in _COUNTS},
        )

    def is_read(self, items: slice = _ALL) -> NDArray[np.bool_]:
        """Tell of each of these items whether an encoder reads it."""
        read: NDArray[np.bool_] = (self.asked[items] == 0) | (self.role[items] == _BOTH)
        return read

    def is_made(self, items: slice = _ALL) -> NDArray[np.bool_]:
        """Tell of each of these items whether a generator makes it."""
        made: NDArray[np.bool_] = self.asked[items] != 0
        return made

    def _named(self, array: str, item: int, names: Sequence[_Name]) -> _Name:
        number = int(getattr(self, array)[item])
        if number >= len(names):
            msg = f"item {item} is of {array} {number} of {len(names)}"
            raise IndexFileError(msg)
        return names[number]


def write_sizes(
    path: Path, blocks: Sequence[int], read: Callable[[int], SampleSizes], about: Mapping[str, str]
) -> None:
    """Write the sizes of blocks of samples as those of all, with one block in memory at a time.

    Args:
        path: of the file.
        blocks: numbers of the blocks, in order; at least one.
        read: returns one of them; all have the same modalities.
        about: texts for the file.

    Raises:
        OSError: the file can't be written.
    """
    pieces = joined_blocks(blocks, lambda number: arrays_of(read(number)), _KINDS, _OFFSETS)
    write_arrays(path, pieces, {"format": FORMAT, "modalities": json.dumps(read(blocks[0]).modalities), **about})


def arrays_of(sizes: SampleSizes) -> dict[str, NDArray[Any]]:
    """Return the arrays of sizes by their names."""
    return {name: getattr(sizes, name) for name in _KINDS}


def sizes_of_arrays(stored: StoredArrays) -> SampleSizes:
    """Return the sizes that a file holds, of which nothing is read yet.

    Raises:
        IndexFileError: it holds other arrays, or such as contradict each other.
    """
    arrays, about = {name: np.asarray(array) for name, array in stored.arrays.items()}, stored.about
    if about.get("format") != FORMAT:
        msg = "it holds no sizes of samples"
        raise IndexFileError(msg)
    try:
        for name in _LATER:
            arrays.setdefault(name, np.zeros(len(arrays["kept"]), dtype=_KINDS[name]))
        wrong = [name for name, kind in _KINDS.items() if arrays[name].dtype != kind or arrays[name].ndim != 1]
        modalities = tuple(map(str, json.loads(about["modalities"])))
        found = SampleSizes(modalities=modalities, **{name: arrays[name] for name in _KINDS})
    except (KeyError, TypeError, ValueError) as error:
        msg = f"it lacks what sizes of samples have ({error!r})"
        raise IndexFileError(msg) from None
    samples, items = len(found.tokens), len(found.modality)
    wrong += [name for name in _SAMPLES if len(arrays[name]) != samples]
    wrong += [name for name in _ITEMS if len(arrays[name]) != items]
    wrong += [] if are_offsets(found.first_item, samples, items) else ["first_item"]
    wrong += [] if are_offsets(found.first_size, items, len(found.size)) else ["first_size"]
    if wrong:
        msg = f"its arrays contradict each other: {', '.join(wrong)}"
        raise IndexFileError(msg)
    return found


def _spread(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return new offsets of the chosen spans, and the places of all their elements."""
    begins, stops = np.asarray(offsets[chosen]), np.asarray(offsets[1:][chosen])
    counts = stops - begins
    if min(begins.min(initial=0), counts.min(initial=0)) < 0 or stops.max(initial=0) > limit:
        first = int(np.argmax((begins < 0) | (counts < 0) | (stops > limit)))
        raise IndexFileError(contradiction(int(begins[first]), int(stops[first]), limit))
    new = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=new[1:])
    places = np.repeat(begins - new[:-1], counts)
    places += np.arange(len(places))
    return new, places
