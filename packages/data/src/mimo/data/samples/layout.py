"""Where every token and item of a sample lies, computed from its ids and headers alone.

Both ends of an edge compute the same layout without exchanging shapes, so nothing here may depend on decoded items.
S tokens of one sample, placeholder rows included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.grid_positions import Grid, grid_positions
from mimo.data.samples.specs import Dataset, Tokenizer, ends_of
from mimo.data.samples.weights import read_weights
from mimo.hooks import ConfigError, DataError, ItemInfo, PluginError

N = TypeVar("N", np.int64, np.float32)

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


@attrs.frozen(kw_only=True)
class LayoutRules:
    """By what samples are laid out: ids of placeholders, and what stands in their places.

    Args:
        tokenizer: names the placeholder of each modality in ``rows`` and ``made``.
        rows: for each modality that the model reads, the rows of an item by its size; 0 is legal.
        grids: of the modalities whose rows may lie in a grid, that of an item by its size; its product is its rows.
        patterns: of the modalities whose items have text between their rows, what an item is by its size, in order:
            counts of rows, which add up to its rows, and texts.
        made: for each modality that the model makes, how a sample holds an item of it.
    """

    tokenizer: Tokenizer
    rows: Rows
    grids: Grids = _NO_GRIDS
    patterns: Patterns = _NO_PATTERNS
    made: Made = _NO_MADE
    _modalities: Mapping[int, str] = attrs.field(init=False)
    """By the id of its placeholder."""
    _vocabulary: int = attrs.field(init=False)

    @_modalities.default
    def _by_placeholder(self) -> Mapping[int, str]:
        return {self.tokenizer.placeholder(modality): modality for modality in (*self.rows, *self.made)}

    @_vocabulary.default
    def _ids_of_the_tokenizer(self) -> int:
        return self.tokenizer.vocabulary

    def lay_out(self, dataset: Dataset, sample: int, *, max_tokens: int) -> SampleLayout:
        """Return the layout of one sample, at most ``max_tokens`` long.

        A longer sample is cut at its end, but never inside an item: an item that does not fit whole is left out with
        everything after it. Where the dataset says at which ids it may end, it is cut at the last of these that fits,
        and to nothing if none does. Each position is labelled with the token after it where that is text (the end is
        text, and so is the first row of what is to be made; what lies between an item's rows isn't); the last one has
        no label.

        Args:
            dataset: asked for ``tokens``, ``infos``, ``where`` and, if it has them, ``weights`` and ``ends`` only.
            sample: number of the sample.
            max_tokens: limit of S.

        Raises:
            DataError: placeholders and items do not match, a modality is not read or made by the model, an item's size
                is refused by ``rows``, an id is not the tokenizer's, or a weight is no finite number from 0 on.
            PluginError: an item's grid or its pattern is not as many rows as ``rows`` says, or a text of the pattern
                holds a placeholder.
        """
        where = partial(dataset.where, sample)
        ids = np.asarray(dataset.tokens(sample), dtype=np.int64)
        marks = _is_any(ids, self._modalities).nonzero()[0]
        infos = self._matched(where, ids, marks, dataset.infos(sample))
        weights = read_weights(dataset, sample, len(ids))

        rows = np.ones(len(ids), dtype=np.int64)  # of each id
        items: list[_Placed] = []
        kept, added = len(ids), 0
        for mark, info in zip(marks.tolist(), infos, strict=True):
            at = mark + added
            if at > max_tokens:
                break
            placed = self._place(where, info, at)
            if placed.stop > max_tokens:
                kept = mark
                break
            items.append(placed)
            rows[mark] = placed.stop - at
            added = placed.stop - mark - 1
        kept = min(kept, max_tokens - added)  # ids behind the last item that fits are a row each
        truncated = kept < len(ids)
        if truncated and (ends := ends_of(dataset, sample)) is not None:
            kept = max((end for end in ends if end <= kept), default=0)
            items = items[: np.searchsorted(marks, kept)]

        tokens = ids[:kept].repeat(rows[:kept])
        for placed in items:
            if placed.ids is not None:
                tokens[placed.start : placed.stop] = placed.ids
        silent = [(placed.start + placed.is_predicted, placed.stop) for placed in items]
        return SampleLayout(
            sample=sample,
            tokens=tokens,
            labels=_of_the_next(tokens, silent, NO_LABEL),
            items=tuple([placed.item for placed in items]),
            truncated=truncated,
            weights=None if weights is None else _of_the_next(weights[:kept].repeat(rows[:kept]), silent, 0),
        )

    def place(self, where: Callable[[], str], info: ItemInfo, *, at: int) -> tuple[NDArray[np.int64], PlacedItem]:
        """Return the ids that stand for one item from a position on, and where it lies; raises as `lay_out` does.

        Args:
            where: returns the place of its sample, for messages.
            info: of the item.
            at: the position.
        """
        placed = self._place(where, info, at)
        if placed.ids is not None:
            return placed.ids, placed.item
        return np.full(placed.stop - at, self.tokenizer.placeholder(info.modality), dtype=np.int64), placed.item

    def _matched(
        self, where: Callable[[], str], ids: NDArray[np.int64], marks: NDArray[np.intp], infos: Sequence[ItemInfo]
    ) -> Sequence[ItemInfo]:
        """Return the items in the order of their placeholders, which are the ids at ``marks``."""
        wanted = [self._modalities[placeholder] for placeholder in ids[marks].tolist()]
        given = [info.modality for info in infos]
        if wanted != given and sorted(wanted) != sorted(given):
            raise _unmatched(where(), ids, infos, self._modalities)
        if len(ids) and ids.view(np.uint64).max() >= self._vocabulary:  # so seen, an id below 0 is a large one
            raise DataError(
                where(),
                expected=f"token ids from 0 to {self._vocabulary - 1}",
                got=str(ids[(ids < 0) | (ids >= self._vocabulary)][0]),
                fix="Check that the data was made with this tokenizer.",
            )
        if wanted == given:
            return infos
        waiting = {modality: iter([info for info in infos if info.modality == modality]) for modality in given}
        return [next(waiting[modality]) for modality in wanted]

    def _place(self, where: Callable[[], str], info: ItemInfo, at: int) -> _Placed:
        if (asked := self._asked(where, info)) is None:
            return self._read(where, info, at)
        behind = at + asked.rows
        made_from = (at, behind) if asked.reads_own else (0, at)
        if info.role != "both":
            item = PlacedItem(info=info, runs=(), asked=(at, behind), made_from=made_from)
            return _Placed(item=item, start=at, stop=behind, is_predicted=True)
        read = self._read(where, info, behind)
        ids = read.ids
        if ids is not None:
            ids = np.concatenate([np.full(asked.rows, self.tokenizer.placeholder(info.modality)), ids])
        item = attrs.evolve(read.item, asked=(at, behind), made_from=made_from)
        return _Placed(item=item, start=at, stop=read.stop, ids=ids, is_predicted=True)

    def _asked(self, where: Callable[[], str], info: ItemInfo) -> MadeItem | None:
        """Return how a sample holds an item that is to be made, None for one that is only read."""
        reads, makes = info.modality in self.rows, info.modality in self.made
        role = info.role or ("input" if reads else "output")
        if role == "input" and reads:
            return None
        for wanted, has, verb, noun in (
            (role != "output", reads, "reads", "encoder"),
            (role != "input", makes, "makes", "generator"),
        ):
            if wanted and not has:
                raise DataError(
                    f"{where()}: {info.modality} {info.index}",
                    expected=f"an item that the model {verb}, as its role is {role!r}",
                    got=f"a model with no {noun} of modality {info.modality!r}",
                    fix="Add one, or give the item another role.",
                )
        return self.made[info.modality]

    def _read(self, where: Callable[[], str], info: ItemInfo, at: int) -> _Placed:
        """Place an item that an encoder reads."""
        stop = at + _rows(where, info, self.rows[info.modality])
        grid = _grid(where, info, stop - at, self.grids)
        if info.modality not in self.patterns:
            return _Placed(item=PlacedItem(info=info, runs=((at, stop),), grid=grid), start=at, stop=stop)
        pattern, placeholder = self.patterns[info.modality](info.size), self.tokenizer.placeholder(info.modality)
        ids, runs = _item(where, info, pattern, stop - at, placeholder, self.tokenizer)
        item = PlacedItem(info=info, runs=tuple((at + start, at + end) for start, end in runs), grid=grid)
        return _Placed(item=item, start=at, stop=at + len(ids), ids=ids)


@attrs.frozen(kw_only=True)
class _Placed:
    """An item, and the rows of its sample that stand for it: those of its encoder, those that call for it, and text.

    Args:
        item: the item.
        start: the first row.
        stop: the row behind the last.
        ids: of these rows; None where all are its placeholder's.
        is_predicted: whether the first row is, as text is; the others never are.
    """

    item: PlacedItem
    start: int
    stop: int
    ids: NDArray[np.int64] | None = None
    is_predicted: bool = False


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
    """Return the layout of one sample by `LayoutRules`; for the arguments see there, and `LayoutRules.lay_out`."""
    rules = LayoutRules(tokenizer=tokenizer, rows=rows, grids=grids, patterns=patterns, made=made)
    return rules.lay_out(dataset, sample, max_tokens=max_tokens)


def _is_any(ids: NDArray[np.int64], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Tell of each id whether it is a wanted one; for the few that there are, an order quicker than `numpy.isin`."""
    first, *others = (ids == one for one in wanted) if wanted else [np.zeros(len(ids), dtype=np.bool_)]
    for other in others:
        first |= other
    return first


def _of_the_next(own: NDArray[N], silent: Iterable[tuple[int, int]], nothing: int) -> NDArray[N]:
    """Return of each row what the next one has; ``nothing`` if that lies in a run of rows that aren't predicted."""
    found = np.empty_like(own)
    found[:-1], found[-1:] = own[1:], nothing
    for start, stop in silent:
        if stop:
            found[max(start - 1, 0) : stop - 1] = nothing
    return found


def _item(
    where: Callable[[], str],
    info: ItemInfo,
    pattern: Sequence[str | int],
    count: int,
    placeholder: int,
    tokenizer: Tokenizer,
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
            f"{where()}: {info.modality} {info.index}",
            expected=f"a pattern of the {count} rows that its encoder says it becomes, and text without placeholders",
            got=f"{found} rows, and {ids.count(placeholder) - found} placeholders in its text",
            fix="Make rows() and pattern() agree.",
        )
    return np.array(ids, dtype=np.int64), runs or [(0, 0)]


def _rows(where: Callable[[], str], info: ItemInfo, rows: Callable[[tuple[int, ...]], int]) -> int:
    """Return the rows of an item; an encoder that refuses its size does not know the sample, so it is named here."""
    try:
        count = rows(info.size)
    except ConfigError:
        raise
    except ValueError as error:
        raise DataError(
            where(),
            expected=f"items that the {info.modality} encoder takes",
            got=f"{info.modality} {info.index} of size {info.size}: {error}",
        ) from error
    if count < 0:
        msg = f"the {info.modality} encoder says that an item of size {info.size} has {count} rows"
        raise ValueError(msg)
    return count


def _grid(where: Callable[[], str], info: ItemInfo, count: int, grids: Grids) -> Grid | None:
    if info.modality not in grids:
        return None
    grid = grids[info.modality](info.size)
    if grid is not None and math.prod(grid) != count:
        raise PluginError(
            f"{where()}: encoder of modality {info.modality!r}",
            expected=f"a grid of the {count} rows that it says an item of size {info.size} becomes",
            got=f"{grid} from its grid()",
            fix="Make rows() and grid() agree.",
        )
    return grid


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
