"""Layouts: expansion, labels, cutting and refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import NO_LABEL, MadeItem, SampleLayout, lay_out, pack
from mimo.data.text.byte_tokenizer import ByteTokenizer
from mimo.data.text.placeholders import Placeholders
from mimo.hooks import ConfigError, DataError, ItemInfo, PluginError

END, IMAGE, AUDIO = 256, 257, 258
TOKENIZER = ByteTokenizer(placeholders=Placeholders({"image": IMAGE, "audio": AUDIO}))
Role: TypeAlias = Literal["", "input", "output", "both"]
ROWS = {"image": lambda size: size[0] * size[1], "audio": lambda size: size[0]}


@attrs.frozen
class Toy:
    """One sample, written out."""

    ids: Sequence[int]
    items: Sequence[tuple[str, tuple[int, ...]]] = ()
    roles: Sequence[Role] = ()

    def __len__(self) -> int:
        return 1

    def tokens(self, sample: int) -> Sequence[int]:
        return self.ids

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        return [
            ItemInfo(
                sample=sample,
                index=index,
                modality=modality,
                size=size,
                role=self.roles[index] if self.roles else "",
            )
            for index, (modality, size) in enumerate(self.items)
        ]

    def raw(self, sample: int, index: int) -> object:
        raise AssertionError("a layout never decodes")

    def where(self, sample: int) -> str:
        return "toy.jsonl:7"


@attrs.frozen
class Weighted(Toy):
    """The same, each token with its number as weight."""

    def weights(self, sample: int) -> Sequence[float]:
        return range(1, len(self.ids) + 1)


def layout(
    toy: Toy,
    max_tokens: int = 100,
    rows: Mapping[str, object] = ROWS,
    grids: Mapping[str, Any] | None = None,
    patterns: Mapping[str, Any] | None = None,
    made: Mapping[str, MadeItem] | None = None,
) -> SampleLayout:
    """Lay out the one sample."""
    return lay_out(
        toy,
        0,
        tokenizer=TOKENIZER,
        rows=rows,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        grids=grids or {},
        patterns=patterns or {},
        made=made or {},
    )


LINES = {"image": lambda size: ["<", *([size[1], "|"] * size[0]), ">"]}
"""An image is its lines of rows, each ended by a bar."""


def placed(found: SampleLayout) -> list[tuple[str, int, int]]:
    """Return (modality, start, rows) of each item."""
    return [(item.info.modality, item.start, item.rows) for item in found.items]


def test_data_layout_expands_placeholders_and_labels_text() -> None:
    """A placeholder becomes as many ids as its item has rows; each position before text is labelled with that text."""
    found = layout(Toy([5, IMAGE, 6, 7, END], [("image", (1, 3))]))
    assert found.tokens.tolist() == [5, IMAGE, IMAGE, IMAGE, 6, 7, END]
    assert found.labels.tolist() == [NO_LABEL, NO_LABEL, NO_LABEL, 6, 7, END, NO_LABEL]
    assert placed(found) == [("image", 1, 3)]
    assert not found.truncated
    assert found.tokens.dtype == found.labels.dtype == "int64"


def test_data_layout_writes_the_text_of_an_item() -> None:
    """Text of an item's pattern stands around and between its rows, and isn't learnt; text behind it is, as ever."""
    found = layout(Toy([5, IMAGE, 6, END], [("image", (2, 2))]), patterns=LINES)
    assert found.tokens.tolist() == [5, 60, IMAGE, IMAGE, 124, IMAGE, IMAGE, 124, 62, 6, END]
    assert found.labels.tolist() == [NO_LABEL] * 8 + [6, END, NO_LABEL]
    assert [item.runs for item in found.items] == [((2, 4), (5, 7))]
    assert placed(found) == [("image", 2, 4)]


def test_data_layout_weights_text_of_an_item_nothing() -> None:
    """The weights of a dataset are those of its own tokens, wherever an item's text moves them."""
    toy = Weighted([5, IMAGE, 6, END], [("image", (1, 1))])
    found = layout(toy, patterns=LINES)
    assert found.tokens.tolist() == [5, 60, IMAGE, 124, 62, 6, END]
    assert found.weights is not None
    assert found.weights.tolist() == [0, 0, 0, 0, 3, 4, 0]


def test_data_layout_cuts_before_an_item_with_its_text() -> None:
    """An item that has room for its rows and not for its text is left out whole."""
    toy = Toy([5, IMAGE, END], [("image", (1, 2))])
    assert layout(toy, max_tokens=6, patterns=LINES).tokens.tolist() == [5, 60, IMAGE, IMAGE, 124, 62]
    cut = layout(toy, max_tokens=5, patterns=LINES)
    assert (cut.tokens.tolist(), cut.items, cut.truncated) == ([5], (), True)


def test_data_layout_refuses_a_pattern_of_other_rows() -> None:
    """A pattern must have the rows of its item, and no placeholder in its text."""
    toy = Toy([IMAGE, END], [("image", (2, 2))])
    with pytest.raises(PluginError, match=r"toy.jsonl:7: image 0: expected a pattern of the 4 rows .*got 3 rows"):
        layout(toy, patterns={"image": lambda _size: [3]})
    with pytest.raises(PluginError, match="got 4 rows, and 1 placeholders in its text"):
        layout(toy, patterns={"image": lambda _size: [4, "<image>"]})


def test_data_layout_of_text_only() -> None:
    """A sample without items is an ordinary one."""
    found = layout(Toy([5, 6, END]))
    assert found.tokens.tolist() == [5, 6, END]
    assert found.labels.tolist() == [6, END, NO_LABEL]
    assert found.items == ()


def test_data_layout_keeps_modalities_apart() -> None:
    """Items take the placeholders of their own modality in order, however the dataset interleaves them."""
    toy = Toy([AUDIO, 5, IMAGE, IMAGE, END], [("image", (1, 1)), ("image", (1, 2)), ("audio", (3,))])
    found = layout(toy)
    assert found.tokens.tolist() == [AUDIO] * 3 + [5] + [IMAGE] * 3 + [END]
    assert [(item.info.index, item.start, item.rows) for item in found.items] == [(2, 0, 3), (0, 4, 1), (1, 5, 2)]


def test_data_layout_item_without_rows_vanishes() -> None:
    """An item of 0 rows takes no position and stays listed; the text after it is predicted by the text before it."""
    found = layout(Toy([5, IMAGE, 6, END], [("image", (0, 4))]))
    assert found.tokens.tolist() == [5, 6, END]
    assert found.labels.tolist() == [6, END, NO_LABEL]
    assert placed(found) == [("image", 1, 0)]
    assert not found.truncated


def test_data_layout_of_nothing() -> None:
    """No ids at all give an empty layout."""
    found = layout(Toy([]))
    assert found.tokens.tolist() == found.labels.tolist() == []
    assert not found.truncated


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "items"),
    [
        (7, [5, 6, IMAGE, IMAGE, IMAGE, 7, END], 1),
        (6, [5, 6, IMAGE, IMAGE, IMAGE, 7], 1),
        (5, [5, 6, IMAGE, IMAGE, IMAGE], 1),
        (4, [5, 6], 0),
        (2, [5, 6], 0),
        (1, [5], 0),
        (0, [], 0),
    ],
)
def test_data_layout_is_cut_outside_items(max_tokens: int, tokens: list[int], items: int) -> None:
    """Text is cut anywhere; an item that does not fit whole is left out with all that follows."""
    found = layout(Toy([5, 6, IMAGE, 7, END], [("image", (3, 1))]), max_tokens=max_tokens)
    assert found.tokens.tolist() == tokens
    assert len(found.items) == items
    assert found.truncated == (max_tokens < 7)
    assert found.labels.tolist()[-1:] in ([], [NO_LABEL])


def test_data_layout_cut_item_takes_later_text_with_it() -> None:
    """Text after an item that was left out is left out too, even if it would fit."""
    found = layout(Toy([IMAGE, 5, IMAGE, 6, END], [("image", (1, 1)), ("image", (9, 9))]), max_tokens=10)
    assert found.tokens.tolist() == [IMAGE, 5]
    assert found.truncated


pieces = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4).map(lambda rows: ("image", (rows, 1)))), max_size=12)


@given(pieces, st.integers(0, 20))
def test_data_layout_is_a_prefix_of_the_whole(parts: list[int | tuple[str, tuple[int, ...]]], limit: int) -> None:
    """Whatever the limit, the layout is a prefix of the uncut one, within the limit, with whole items only."""
    ids = [part if isinstance(part, int) else IMAGE for part in parts]
    toy = Toy([*ids, END], [part for part in parts if not isinstance(part, int)])
    whole, cut = layout(toy), layout(toy, max_tokens=limit)
    length = len(cut.tokens)
    assert length <= limit
    assert cut.tokens.tolist() == whole.tokens[:length].tolist()
    assert cut.items == whole.items[: len(cut.items)]
    assert sum(item.rows for item in cut.items) == cut.tokens.tolist().count(IMAGE)
    assert cut.truncated == (length < len(whole.tokens))
    for item in cut.items:
        assert set(cut.tokens[item.start : item.start + item.rows].tolist()) <= {IMAGE}
    following = cut.tokens.tolist()[1:]
    assert cut.labels.tolist() == [NO_LABEL if i == IMAGE else i for i in following] + [NO_LABEL] * (length > 0)


@pytest.mark.parametrize(("ids", "items", "counts"), [([5, END], 1, "0 in the text for 1"), ([IMAGE], 3, "1 in the")])
def test_data_layout_refuses_unequal_counts(ids: list[int], items: int, counts: str) -> None:
    """Placeholders that are not as many as items are told with place, modality and both counts."""
    expected = f"toy.jsonl:7: expected one placeholder <image> for each item of modality 'image', got {counts}"
    with pytest.raises(DataError, match=re.escape(expected)):
        layout(Toy(ids, [("image", (1, 1))] * items))


def test_data_layout_refuses_unread_modality() -> None:
    """An item that no encoder reads is told by its modality."""
    toy = Toy([AUDIO, END], [("audio", (1,))])
    expected = "toy.jsonl:7: expected items of modality 'image', got an item of modality 'audio'. Give the model an enc"
    with pytest.raises(DataError, match=re.escape(expected)):
        layout(toy, rows={"image": ROWS["image"]})
    with pytest.raises(DataError, match=re.escape("items of no modality, since the model has no encoder")):
        layout(toy, rows={})


def test_data_layout_refuses_foreign_ids() -> None:
    """Ids beyond the tokenizer's vocabulary never reach the model."""
    with pytest.raises(DataError, match=re.escape("toy.jsonl:7: expected token ids from 0 to 258, got 259.")):
        layout(Toy([5, 259]))


def test_data_layout_names_sample_whose_size_is_refused() -> None:
    """An encoder that refuses a size is told with the sample's place; its own settings' errors pass."""

    def refuse(size: tuple[int, ...]) -> int:
        msg = "smaller than one patch"
        raise ValueError(msg)

    def misconfigured(size: tuple[int, ...]) -> int:
        raise ConfigError("modules.vision.config.patch", expected="1 or more", got="0")

    toy = Toy([IMAGE], [("image", (1, 1))])
    expected = "toy.jsonl:7: expected items that the image encoder takes, got image 0 of size (1, 1): smaller than one"
    with pytest.raises(DataError, match=re.escape(expected)):
        layout(toy, rows={"image": refuse})
    with pytest.raises(ConfigError, match=re.escape("modules.vision.config.patch")):
        layout(toy, rows={"image": misconfigured})
    with pytest.raises(ValueError, match="has -1 rows"):
        layout(toy, rows={"image": lambda size: -1})


def test_data_layout_places_rows_in_grids() -> None:
    """Text counts on; a grid counts its own axes from there; what follows goes on from the largest number + 1."""
    toy = Toy([5, IMAGE, 6, AUDIO, IMAGE, END], [("image", (2, 3)), ("audio", (2,)), ("image", (0, 4))])
    found = layout(toy, grids={"image": lambda size: (1, *size)}).grid_positions
    assert found is not None
    grid = [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3]]
    assert found.tolist() == [[0] * 3, *grid, [4] * 3, [5] * 3, [6] * 3, [7] * 3]


def test_data_layout_counts_frames_first() -> None:
    """Frames, then rows down, then columns; a side longer than all others is what text goes on from."""
    found = layout(Toy([IMAGE, END], [("image", (4, 2))]), grids={"image": lambda size: (4, 1, 2)}).grid_positions
    assert found is not None
    assert found.tolist() == [[frame, 0, column] for frame in range(4) for column in range(2)] + [[4] * 3]


def test_data_layout_without_grids_has_no_places() -> None:
    """Where no encoder tells a grid, or none of this item, positions say all; the rest of a cut sample is left out."""
    toy = Toy([5, IMAGE, END], [("image", (2, 3))])
    assert layout(toy).grid_positions is None
    assert layout(toy, grids={"image": lambda size: None}).grid_positions is None
    assert layout(toy, max_tokens=3, grids={"image": lambda size: (1, *size)}).grid_positions is None


def test_data_layout_refuses_grids_of_other_rows() -> None:
    """A grid that isn't as many rows as the encoder says is its plugin's fault."""
    message = (
        "encoder of modality 'image': expected a grid of the 6 rows that it says an item of size (2, 3) becomes, "
        "got (1, 2, 2) from its grid(). Make rows() and grid() agree."
    )
    with pytest.raises(PluginError, match=re.escape(message)):
        layout(Toy([IMAGE], [("image", (2, 3))]), grids={"image": lambda size: (1, 2, 2)})


MADE = {"image": MadeItem()}


def test_data_layout_has_what_is_made_predicted_as_text() -> None:
    """Its placeholder calls for it, by default one row, which the row before predicts and text follows."""
    found = layout(Toy([5, 6, IMAGE, END], [("image", (2, 3))]), rows={}, made=MADE)
    assert found.tokens.tolist() == [5, 6, IMAGE, END]
    assert found.labels.tolist() == [6, IMAGE, END, NO_LABEL]
    (item,) = found.items
    assert (item.runs, item.asked, item.made_from, item.rows) == ((), (2, 3), (0, 2), 0)
    assert (item.start, item.stop) == (2, 3)
    assert found.made("image") == (item,)
    assert found.items_of("image") == ()
    assert pack([found], with_items=True).placeholders == {}


def test_data_layout_makes_items_from_rows_of_their_own() -> None:
    """Of several rows the first alone is predicted; a second item is made from its own."""
    made = {"image": MadeItem(rows=3, reads_own=True)}
    found = layout(Toy([IMAGE, 5, IMAGE, END], [("image", (1,)), ("image", (2,))]), rows={}, made=made)
    assert found.tokens.tolist() == [IMAGE] * 3 + [5] + [IMAGE] * 3 + [END]
    assert found.labels.tolist() == [NO_LABEL, NO_LABEL, 5, IMAGE, NO_LABEL, NO_LABEL, END, NO_LABEL]
    assert [item.made_from for item in found.items] == [(0, 3), (4, 7)]


def test_data_layout_makes_a_second_item_from_all_before() -> None:
    """What is first in its sample is made from nothing."""
    found = layout(Toy([IMAGE, 5, IMAGE], [("image", (1,)), ("image", (2,))]), rows={}, made=MADE)
    assert [item.made_from for item in found.items] == [(0, 0), (0, 2)]


def test_data_layout_reads_behind_what_it_makes() -> None:
    """What is both comes twice: its placeholder, and behind that the rows of its encoder, which nothing predicts."""
    toy = Toy([5, IMAGE, 6], [("image", (1, 2))], roles=["both"])
    found = layout(toy, made=MADE, grids={"image": lambda size: (1, *size)})
    assert found.tokens.tolist() == [5, IMAGE, IMAGE, IMAGE, 6]
    assert found.labels.tolist() == [IMAGE, NO_LABEL, NO_LABEL, 6, NO_LABEL]
    (item,) = found.items
    assert (item.asked, item.runs, item.made_from) == ((1, 2), ((2, 4),), (0, 1))
    assert (item.start, item.stop) == (1, 4)
    assert found.items_of("image") == found.made("image") == (item,)
    assert found.grid_positions is not None
    assert found.grid_positions[:, 2].tolist() == [0, 1, 2, 3, 4]
    assert pack([found]).placeholders["image"].tolist() == [2, 3]


def test_data_layout_reads_where_nothing_is_said_and_both_are_possible() -> None:
    """An item without a role is an input where the model reads its modality."""
    found = layout(Toy([5, IMAGE], [("image", (1, 2))]), made=MADE)
    assert [item.asked for item in found.items] == [None]


def test_data_layout_weighs_what_calls_for_an_item() -> None:
    """The weight of its placeholder is that of predicting it, as of any token."""
    found = layout(Weighted([5, IMAGE, 6], [("image", (1, 2))], ["both"]), made=MADE)
    assert found.weights is not None
    assert found.weights.tolist() == [2, 0, 0, 3, 0]


def test_data_layout_cuts_before_an_item_that_is_made() -> None:
    """It is left out whole, as one that is read."""
    toy = Weighted([5, IMAGE, 6], [("image", (1, 2))], ["both"])
    found = layout(toy, max_tokens=3, made=MADE)
    assert (found.tokens.tolist(), found.items, found.truncated) == ([5], (), True)
    assert found.weights is not None
    assert found.weights.tolist() == [0]


@pytest.mark.parametrize(
    ("role", "rows", "made", "message"),
    [
        (
            "output",
            ROWS,
            {},
            (
                "toy.jsonl:7: image 0: expected an item that the model makes, as its role is 'output', got a model "
                "with no generator of modality 'image'. Add one, or give the item another role."
            ),
        ),
        (
            "both",
            {},
            MADE,
            (
                "toy.jsonl:7: image 0: expected an item that the model reads, as its role is 'both', got a model with "
                "no encoder of modality 'image'. Add one, or give the item another role."
            ),
        ),
    ],
)
def test_data_layout_refuses_roles_that_the_model_has_not(role: Role, rows: Any, made: Any, message: str) -> None:
    """By the place of the item."""
    with pytest.raises(DataError, match=re.escape(message)):
        layout(Toy([IMAGE], [("image", (1, 2))], roles=[role]), rows=rows, made=made)
