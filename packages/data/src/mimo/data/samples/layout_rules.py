"""Lays samples out by their ids and headers alone.

Both ends of an edge compute the same layout without exchanging shapes, so nothing here may depend on decoded items.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.grid_positions import Grid
from mimo.data.samples.layout import NO_LABEL, PlacedItem, SampleLayout
from mimo.data.samples.specs import Dataset, Tokenizer, ends_of
from mimo.data.samples.weights import read_weights
from mimo.hooks import ConfigError, DataError, ItemInfo, PluginError

N = TypeVar("N", np.int64, np.float32)

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
_NO_IDS = np.empty(0, dtype=np.int64)


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
        """Return the layout of one sample; see `lay_out_all`."""
        return self.lay_out_all(dataset, [sample], max_tokens=max_tokens)[0]

    def lay_out_all(self, dataset: Dataset, samples: Sequence[int], *, max_tokens: int) -> list[SampleLayout]:
        """Return the layouts of samples, each at most ``max_tokens`` long; quicker than one sample after the other.

        A longer sample is cut at its end, but never inside an item: an item that does not fit whole is left out with
        everything after it. Where the dataset says at which ids it may end, it is cut at the last of these that fits,
        and to nothing if none does. Each position is labelled with the token after it where that is text (the end is
        text, and so is the first row of what is to be made; what lies between an item's rows isn't); the last one has
        no label.

        Args:
            dataset: asked for ``tokens``, ``infos``, ``where`` and, if it has them, ``weights`` and ``ends`` only.
            samples: their numbers.
            max_tokens: limit of S.

        Raises:
            DataError: placeholders and items do not match, a modality is not read or made by the model, an item's size
                is refused by ``rows``, an id is not the tokenizer's, or a weight is no finite number from 0 on.
            PluginError: an item's grid or its pattern is not as many rows as ``rows`` says, or a text of the pattern
                holds a placeholder.
        """
        # Whole samples one after the other, as datasets remember what they have read last.
        return _expanded([self._fitted(dataset, sample, max_tokens) for sample in samples])

    def place(self, where: Callable[[], str], info: ItemInfo, *, at: int) -> tuple[NDArray[np.int64], PlacedItem]:
        """Return the ids that stand for one item from a position on, and where it lies; raises as `lay_out_all` does.

        Args:
            where: returns the place of its sample, for messages.
            info: of the item.
            at: the position.
        """
        placed = self._place(where, info, at)
        if placed.ids is not None:
            return placed.ids, placed.item
        return np.full(placed.stop - at, self.tokenizer.placeholder(info.modality), dtype=np.int64), placed.item

    def _fitted(self, dataset: Dataset, sample: int, max_tokens: int) -> _Fitted:
        """Read a sample, and return what fits of it."""
        where = partial(dataset.where, sample)
        ids = np.asarray(dataset.tokens(sample), dtype=np.int64)
        found = _is_any(ids, self._modalities).nonzero()[0]
        infos = self._matched(where, ids, found, dataset.infos(sample))
        weights = read_weights(dataset, sample, len(ids))
        marks, items = found.tolist(), list[_Placed]()
        kept, added = len(ids), 0
        for mark, info in zip(marks, infos, strict=True):
            at = mark + added
            if at > max_tokens:
                break
            placed = self._place(where, info, at)
            if placed.stop > max_tokens:
                kept = mark
                break
            items.append(placed)
            added = placed.stop - mark - 1
        kept = min(kept, max_tokens - added)  # ids behind the last item that fits are a row each
        truncated = kept < len(ids)
        if truncated and (ends := ends_of(dataset, sample)) is not None:
            kept = max((end for end in ends if end <= kept), default=0)
            items = items[: bisect_left(marks, kept)]
        return _Fitted(
            sample=sample,
            ids=ids[:kept],
            marks=marks,
            items=items,
            truncated=truncated,
            weights=None if weights is None else weights[:kept],
        )

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


@attrs.frozen(kw_only=True)
class _Fitted:
    """A sample as far as it fits, each item one id of it.

    Args:
        sample: its number in the dataset.
        ids: all of it.
        marks: where in them the placeholders are.
        items: in the places of the first of these.
        truncated: whether something was cut off.
        weights: of each id; None: each is 1.
    """

    sample: int
    ids: NDArray[np.int64]
    marks: Sequence[int]
    items: Sequence[_Placed]
    truncated: bool
    weights: NDArray[np.float32] | None

    @property
    def rows(self) -> int:
        """How long it is with the rows of its items."""
        return len(self.ids) + sum([item.stop - item.start - 1 for item in self.items])


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
    """Return the layout of one sample by `LayoutRules`; for the rest see there, and `LayoutRules.lay_out_all`."""
    rules = LayoutRules(tokenizer=tokenizer, rows=rows, grids=grids, patterns=patterns, made=made)
    return rules.lay_out(dataset, sample, max_tokens=max_tokens)


def _is_any(ids: NDArray[np.int64], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Tell of each id whether it is a wanted one; for the few that there are, an order quicker than `numpy.isin`."""
    first, *others = (ids == one for one in wanted) if wanted else [np.zeros(len(ids), dtype=np.bool_)]
    for other in others:
        first |= other
    return first


def _expanded(samples: Sequence[_Fitted]) -> list[SampleLayout]:
    """Put rows in the places of items, and label all; of each array of all samples end to end, each has its part."""
    ids = np.concatenate([_NO_IDS, *(each.ids for each in samples)])
    firsts = accumulate((len(each.ids) for each in samples), initial=0)
    bounds = list(accumulate((each.rows for each in samples), initial=0))
    rows = np.ones(len(ids), dtype=np.int64)  # of each id
    for first, each in zip(firsts, samples, strict=False):
        for mark, item in zip(each.marks, each.items, strict=False):
            rows[first + mark] = item.stop - item.start
    tokens = ids.repeat(rows)
    silent: list[tuple[int, int]] = []  # labels of which items are not learned
    for begin, each in zip(bounds, samples, strict=False):
        for item in each.items:
            if item.ids is not None:
                tokens[begin + item.start : begin + item.stop] = item.ids
            if item.stop:
                silent.append((begin + max(item.start + item.is_predicted - 1, 0), begin + item.stop - 1))
    labels, weights = _of_the_next(tokens, bounds, silent, NO_LABEL), None
    if any(each.weights is not None for each in samples):
        own = [np.ones(len(each.ids), np.float32) if each.weights is None else each.weights for each in samples]
        weights = _of_the_next(np.concatenate(own).repeat(rows), bounds, silent, 0)
    return [
        SampleLayout(
            sample=each.sample,
            tokens=tokens[begin:end],
            labels=labels[begin:end],
            items=tuple([item.item for item in each.items]),
            truncated=each.truncated,
            weights=None if weights is None or each.weights is None else weights[begin:end],
        )
        for each, (begin, end) in zip(samples, pairwise(bounds), strict=True)
    ]


def _of_the_next(own: NDArray[N], bounds: Sequence[int], silent: Iterable[tuple[int, int]], nothing: int) -> NDArray[N]:
    """Return of each row what the next row of its sample has; ``nothing`` of the last one, and of silent spans."""
    found = np.empty_like(own)
    found[:-1] = own[1:]
    found[[end - 1 for end in bounds if end]] = nothing
    for start, stop in silent:
        found[start:stop] = nothing
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
