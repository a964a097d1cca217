"""Where every token and item of a sample lies, computed from its ids and headers alone.

Both ends of an edge compute the same layout without exchanging shapes, so nothing here may depend on decoded items.
S tokens of one sample, placeholder rows included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.grid_positions import Grid, grid_positions
from mimo.data.samples.specs import Dataset, Tokenizer, ends_of
from mimo.data.samples.weights import label_weights, read_weights
from mimo.hooks import ConfigError, DataError, ItemInfo, PluginError

NO_LABEL = -100
"""Label of a position whose next token is not to be learned."""

Rows: TypeAlias = Mapping[str, Callable[[tuple[int, ...]], int]]
"""For each modality, the rows that an item of a size becomes."""
Grids: TypeAlias = Mapping[str, Callable[[tuple[int, ...]], Grid | None]]
"""For each modality whose rows may lie in grids, that of an item of a size, None for one in none."""
Patterns: TypeAlias = Mapping[str, Callable[[tuple[int, ...]], Sequence[str | int]]]
"""For each modality whose items have text between their rows, that of an item of a size: texts, and counts of rows."""


@attrs.frozen(kw_only=True)
class MadeItem:
    """How a sample holds an item that a generator is to make.

    Args:
        rows: how many rows its placeholder is, at least one.
        reads_own: whether it is made from these rows; otherwise from all rows of the sample before them.
    """

    rows: int = 1
    reads_own: bool = False


Made: TypeAlias = Mapping[str, MadeItem]
"""For each modality that the model makes, how a sample holds an item of it."""
_NO_GRIDS: Grids = {}
_NO_MADE: Made = {}
_NO_PATTERNS: Patterns = {}


@attrs.frozen(kw_only=True)
class PlacedItem:
    """An item, and where its rows lie in its sample.

    Args:
        info: of the item.
        runs: begin and end of each run of positions that its encoder's rows take, ascending; at least one if it is
            read. Between them lies text of the item.
        grid: of the rows.
        is_broken: it can't be decoded, so that its rows are zeros, and nothing is learned of making it.
        asked: begin and end of the positions of the placeholder that calls for it, before its rows if it has some; None
            for one that is only read.
        made_from: begin and end of the positions of the rows from which it is made, maybe none; None likewise.
    """

    info: ItemInfo
    runs: tuple[tuple[int, int], ...]
    grid: Grid | None = None
    is_broken: bool = False
    asked: tuple[int, int] | None = None
    made_from: tuple[int, int] | None = None

    @property
    def start(self) -> int:
        """Position of its first row, or that of its placeholder."""
        return self.runs[0][0] if self.asked is None else self.asked[0]

    @property
    def stop(self) -> int:
        """Position behind its last row."""
        return self.runs[-1][1] if self.runs or self.asked is None else self.asked[1]

    @property
    def rows(self) -> int:
        """How many rows its encoder makes of it."""
        return sum(stop - start for start, stop in self.runs)


@attrs.frozen(kw_only=True, eq=False)
class SampleLayout:
    """One sample as the language model sees it.

    Args:
        sample: its number in the dataset.
        tokens: ids ``[S]``; an item is its placeholder's id, once for each of its rows, and the text between these; one
            that is made is the same id for each row that calls for it.
        labels: ``[S]``; the id to be predicted at each position, or `NO_LABEL`.
        items: the items that lie in it, by position.
        truncated: whether something was cut off to keep S within the limit.
        weights: ``[S]`` of each label, that of the token to be predicted; 0 where there is none. None: each is 1.
    """

    sample: int
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    items: tuple[PlacedItem, ...]
    truncated: bool
    weights: NDArray[np.float32] | None = None

    def broken(self, indices: Collection[int]) -> SampleLayout:
        """Return the sample as one of which nothing is learned, as the items of these indices can't be decoded."""
        items = tuple(attrs.evolve(item, is_broken=item.info.index in indices) for item in self.items)
        return attrs.evolve(self, weights=np.zeros(len(self.tokens), dtype=np.float32), items=items)

    @property
    def targets(self) -> NDArray[np.bool_]:
        """Tell of each row ``[S]`` whether it is learned from: whether it has a label whose weight is not 0."""
        return self.labels != NO_LABEL if self.weights is None else self.weights > 0

    @property
    def label_weight(self) -> float:
        """The sum of the weights of its labels."""
        return float(np.count_nonzero(self.targets) if self.weights is None else self.weights.sum(dtype=np.float64))

    def items_of(self, modality: str) -> tuple[PlacedItem, ...]:
        """Return the items of a modality that are read, by position."""
        return tuple(item for item in self.items if item.runs and item.info.modality == modality)

    def made(self, modality: str) -> tuple[PlacedItem, ...]:
        """Return the items of a modality that are to be made, by position."""
        return tuple(item for item in self.items if item.asked is not None and item.info.modality == modality)

    @property
    def is_broken(self) -> bool:
        """Whether an item of it can't be decoded, so that nothing of it is learned."""
        return any(item.is_broken for item in self.items)

    @property
    def grid_positions(self) -> NDArray[np.int64] | None:
        """Places ``[S, 3]`` in time, down and across of all rows; None where none lies in a grid."""
        grids = [(item.runs[0][0], item.grid) for item in self.items if item.grid is not None]
        return grid_positions(len(self.tokens), grids) if grids else None


def lay_out(
    dataset: Dataset,
    sample: int,
    *,
    tokenizer: Tokenizer,
    rows: Rows,
    max_tokens: int,
    grids: Grids = _NO_GRIDS,
    patterns: Patterns = _NO_PATTERNS,
    made: Made = _NO_MADE,
) -> SampleLayout:
    """Return the layout of one sample, at most ``max_tokens`` long.

    A longer sample is cut at its end, but never inside an item: an item that does not fit whole is left out with
    everything after it. Where the dataset says at which ids it may end, it is cut at the last of these that fits, and
    to nothing if none does. Each position is labelled with the token after it where that is text (the end is text, and
    so is the first row of what is to be made; what lies between an item's rows isn't); the last one has no label.

    Args:
        dataset: asked for ``tokens``, ``infos``, ``where`` and, if it has them, ``weights`` and ``ends`` only.
        sample: number of the sample.
        tokenizer: names the placeholder of each modality in ``rows`` and ``made``.
        rows: for each modality that the model reads, the rows of an item by its size; 0 is legal.
        max_tokens: limit of S.
        grids: of the modalities whose rows may lie in a grid, that of an item by its size; its product is its rows.
        patterns: of the modalities whose items have text between their rows, what an item is by its size, in order:
            counts of rows, which add up to its rows, and texts.
        made: for each modality that the model makes, how a sample holds an item of it.

    Raises:
        DataError: placeholders and items do not match, a modality is not read or made by the model, an item's size is
            refused by ``rows``, an id is not the tokenizer's, or a weight is no finite number from 0 on.
        PluginError: an item's grid or its pattern is not as many rows as ``rows`` says, or a text of the pattern holds
            a placeholder.
    """
    where = dataset.where(sample)
    ids = np.asarray(dataset.tokens(sample), dtype=np.int64)
    infos = tuple(dataset.infos(sample))
    modalities = {tokenizer.placeholder(modality): modality for modality in (*rows, *made)}
    marks = _is_any(ids, modalities).nonzero()[0].tolist()
    _check(where, ids, marks, infos, modalities, tokenizer.vocabulary)
    weights = read_weights(dataset, sample, len(ids))
    placing = _Placing(tokenizer=tokenizer, rows=rows, grids=grids, patterns=patterns, made=made)

    waiting = {
        modality: iter([info for info in infos if info.modality == modality]) for modality in modalities.values()
    }
    pieces: list[NDArray[np.int64]] = [ids[:0]]
    widths: list[int | None] = [None]
    """Of each piece, how many rows the one id of an item is; None for text."""
    items: list[PlacedItem] = []
    predicted: list[bool] = []
    """Of each placeholder whether it is predicted as text is."""
    silent: list[tuple[int, int]] = []
    """Runs of rows that aren't."""
    length = 0
    truncated = False
    for piece, modality in _pieces(ids, marks, modalities):
        room = max_tokens - length
        if modality is None:
            placed, width = piece[:room], None
            truncated = len(piece) > room
        else:
            placed, item = placing.place(where, next(waiting[modality]), int(piece[0]), at=length)
            predicted.append(item.asked is not None)
            width = len(placed)
            if truncated := width > room:
                break
            items.append(item)
            silent.append((length + predicted[-1], length + width))
        pieces.append(placed)
        widths.append(width)
        length += len(placed)
        if truncated:
            break
    tokens = np.concatenate(pieces)
    if truncated and (ends := ends_of(dataset, sample)) is not None:
        rows_of_ids = np.concatenate(
            [
                np.ones_like(piece) if width is None else np.array([width])
                for piece, width in zip(pieces, widths, strict=True)
            ]
        )
        kept = max((end for end in ends if end <= len(rows_of_ids)), default=0)
        tokens = tokens[: rows_of_ids[:kept].sum()]
        items = items[: sum(mark < kept for mark in marks)]
    if weights is not None:
        was_silent = [mark for number, mark in enumerate(marks) if number >= len(predicted) or not predicted[number]]
        weights = label_weights(
            weights,
            was_text=_without(len(ids), [(mark, mark + 1) for mark in was_silent]),
            is_text=_without(len(tokens), silent),
        )
    return SampleLayout(
        sample=sample,
        tokens=tokens,
        labels=_labels(tokens, silent),
        items=tuple(items),
        truncated=truncated,
        weights=weights,
    )


def place_item(
    where: str,
    info: ItemInfo,
    *,
    at: int,
    tokenizer: Tokenizer,
    rows: Rows,
    grids: Grids = _NO_GRIDS,
    patterns: Patterns = _NO_PATTERNS,
    made: Made = _NO_MADE,
) -> tuple[NDArray[np.int64], PlacedItem]:
    """Return the ids that stand for one item from a position on, and where it lies; see `lay_out`.

    Args:
        where: place of its sample, for messages.
        info: of the item.
        at: the position.
        tokenizer: names its placeholder.
        rows: as in `lay_out`, like all that follow.
        grids: likewise.
        patterns: likewise.
        made: likewise.
    """
    placing = _Placing(tokenizer=tokenizer, rows=rows, grids=grids, patterns=patterns, made=made)
    return placing.place(where, info, tokenizer.placeholder(info.modality), at=at)


def _pieces(
    ids: NDArray[np.int64], marks: Iterable[int], modalities: Mapping[int, str]
) -> Iterator[tuple[NDArray[np.int64], str | None]]:
    """Yield runs of text, with None, and single placeholders, with their modality, in order."""
    start = 0
    for at in marks:
        if start < at:
            yield ids[start:at], None
        yield ids[at : at + 1], modalities[int(ids[at])]
        start = at + 1
    if start < len(ids):
        yield ids[start:], None


def _is_any(ids: NDArray[np.int64], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Tell of each id whether it is a wanted one; for the few that there are, an order quicker than `numpy.isin`."""
    first, *others = (ids == one for one in wanted) if wanted else [np.zeros(len(ids), dtype=np.bool_)]
    for other in others:
        first |= other
    return first


def _without(count: int, runs: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Tell of each of so many rows whether it lies in none of some runs."""
    found = np.ones(count, dtype=np.bool_)
    for start, stop in runs:
        found[start:stop] = False
    return found


def _labels(tokens: NDArray[np.int64], silent: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Return of each row the token behind it, unless that lies in a run of rows that aren't predicted."""
    labels = np.empty_like(tokens)
    labels[:-1], labels[-1:] = tokens[1:], NO_LABEL
    for start, stop in silent:
        if stop:
            labels[max(start - 1, 0) : stop - 1] = NO_LABEL
    return labels


@attrs.frozen(kw_only=True)
class _Placing:
    """Lays out items; for the arguments see `lay_out`."""

    tokenizer: Tokenizer
    rows: Rows
    grids: Grids
    patterns: Patterns
    made: Made

    def place(self, where: str, info: ItemInfo, placeholder: int, *, at: int) -> tuple[NDArray[np.int64], PlacedItem]:
        """Return the ids that stand for an item from a position on, and the item."""
        asked = self._asked(where, info)
        if asked is None:
            return self._read(where, info, placeholder, at)
        behind = at + asked.rows
        ids = np.full(asked.rows, placeholder, dtype=np.int64)
        item = PlacedItem(info=info, runs=())
        if info.role == "both":
            own, item = self._read(where, info, placeholder, behind)
            ids = np.concatenate([ids, own])
        made_from = (at, behind) if asked.reads_own else (0, at)
        return ids, attrs.evolve(item, asked=(at, behind), made_from=made_from)

    def _asked(self, where: str, info: ItemInfo) -> MadeItem | None:
        """Return how a sample holds an item that is to be made, None for one that is only read."""
        reads, makes = info.modality in self.rows, info.modality in self.made
        role = info.role or ("input" if reads else "output")
        for wanted, has, verb, noun in (
            (role != "output", reads, "reads", "encoder"),
            (role != "input", makes, "makes", "generator"),
        ):
            if wanted and not has:
                raise DataError(
                    f"{where}: {info.modality} {info.index}",
                    expected=f"an item that the model {verb}, as its role is {role!r}",
                    got=f"a model with no {noun} of modality {info.modality!r}",
                    fix="Add one, or give the item another role.",
                )
        return None if role == "input" else self.made[info.modality]

    def _read(self, where: str, info: ItemInfo, placeholder: int, at: int) -> tuple[NDArray[np.int64], PlacedItem]:
        """Return the same of an item that an encoder reads."""
        count = _rows(where, info, self.rows[info.modality])
        ids, runs = np.full(count, placeholder, dtype=np.int64), [(0, count)]
        if info.modality in self.patterns:
            pattern = self.patterns[info.modality](info.size)
            ids, runs = _item(f"{where}: {info.modality} {info.index}", pattern, count, placeholder, self.tokenizer)
        places = tuple((at + start, at + stop) for start, stop in runs)
        return ids, PlacedItem(info=info, runs=places, grid=_grid(where, info, count, self.grids))


def _item(
    where: str, pattern: Sequence[str | int], count: int, placeholder: int, tokenizer: Tokenizer
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Return the ids of an item with text between its rows, and begin and end of each run of rows in them."""
    ids: list[int] = []
    runs: list[tuple[int, int]] = []
    for piece in pattern:
        if isinstance(piece, int):
            runs.append((len(ids), len(ids) + piece))
            ids += [placeholder] * piece
        else:
            ids += tokenizer.encode(piece)
    found = sum(stop - start for start, stop in runs)
    if found != count or ids.count(placeholder) != count:
        raise PluginError(
            where,
            expected=f"a pattern of the {count} rows that its encoder says it becomes, and text without placeholders",
            got=f"{found} rows, and {ids.count(placeholder) - found} placeholders in its text",
            fix="Make rows() and pattern() agree.",
        )
    return np.array(ids, dtype=np.int64), runs or [(0, 0)]


def _rows(where: str, info: ItemInfo, rows: Callable[[tuple[int, ...]], int]) -> int:
    """Return the rows of an item; an encoder that refuses its size does not know the sample, so it is named here."""
    try:
        count = rows(info.size)
    except ConfigError:
        raise
    except ValueError as error:
        raise DataError(
            where,
            expected=f"items that the {info.modality} encoder takes",
            got=f"{info.modality} {info.index} of size {info.size}: {error}",
        ) from error
    if count < 0:
        msg = f"the {info.modality} encoder says that an item of size {info.size} has {count} rows"
        raise ValueError(msg)
    return count


def _grid(where: str, info: ItemInfo, count: int, grids: Grids) -> Grid | None:
    if info.modality not in grids:
        return None
    grid = grids[info.modality](info.size)
    if grid is not None and math.prod(grid) != count:
        raise PluginError(
            f"{where}: encoder of modality {info.modality!r}",
            expected=f"a grid of the {count} rows that it says an item of size {info.size} becomes",
            got=f"{grid} from its grid()",
            fix="Make rows() and grid() agree.",
        )
    return grid


def _check(
    where: str,
    ids: NDArray[np.int64],
    marks: Sequence[int],
    infos: Sequence[ItemInfo],
    modalities: Mapping[int, str],
    vocabulary: int,
) -> None:
    if sorted(modalities[int(ids[mark])] for mark in marks) != sorted(info.modality for info in infos):
        raise _unmatched(where, ids, infos, modalities)
    if len(ids) and ids.view(np.uint64).max() >= vocabulary:  # so seen, an id below 0 is a large one
        raise DataError(
            where,
            expected=f"token ids from 0 to {vocabulary - 1}",
            got=str(ids[(ids < 0) | (ids >= vocabulary)][0]),
            fix="Check that the data was made with this tokenizer.",
        )


def _unmatched(
    where: str, ids: NDArray[np.int64], infos: Sequence[ItemInfo], modalities: Mapping[int, str]
) -> DataError:
    """Return how placeholders and items don't match."""
    known = set(modalities.values())
    items = Counter(info.modality for info in infos)
    if strange := next((modality for modality in items if modality not in known), None):
        return DataError(
            where,
            expected=f"items of {_listed(known)}",
            got=f"an item of modality {strange!r}",
            fix=f"Give the model an encoder that reads {strange!r}, or leave such samples out.",
        )
    counts = ((modality, int(np.count_nonzero(ids == placeholder))) for placeholder, modality in modalities.items())
    modality, marks = next((modality, marks) for modality, marks in counts if marks != items[modality])
    return DataError(
        where,
        expected=f"one placeholder <{modality}> for each item of modality {modality!r}",
        got=f"{marks} in the text for {items[modality]} in the sample",
        fix="Write the placeholder exactly where each item belongs.",
    )


def _listed(modalities: set[str]) -> str:
    names = " or ".join(repr(name) for name in sorted(modalities))
    return f"modality {names}" if names else "no modality, since the model has no encoder"
