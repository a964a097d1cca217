"""Weights of what is to be predicted: read from a dataset, laid beside labels, packed and cut with them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from mimo.data import NO_LABEL, SampleLayout, lay_out, pack
from mimo.data.text.byte_tokenizer import ByteTokenizer
from mimo.data.text.placeholders import Placeholders
from mimo.hooks import DataError, ItemInfo

END, IMAGE = 256, 257
TOKENIZER = ByteTokenizer(placeholders=Placeholders({"image": IMAGE}))


@attrs.frozen
class Weighted:
    """One sample, written out, with its weights."""

    ids: Sequence[int]
    given: Sequence[float] | None

    def __len__(self) -> int:
        return 1

    def tokens(self, sample: int) -> Sequence[int]:
        return self.ids

    def weights(self, sample: int) -> Sequence[float] | None:
        return self.given

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        count = self.ids.count(IMAGE)
        return [ItemInfo(sample=0, index=index, modality="image", size=(index + 1,)) for index in range(count)]

    def raw(self, sample: int, index: int) -> object:
        raise AssertionError("a layout never decodes")

    def where(self, sample: int) -> str:
        return "toy.jsonl:7"


def layout(ids: Sequence[int], weights: Sequence[float] | None, max_tokens: int = 100) -> SampleLayout:
    """Lay out a sample whose n-th image has n rows."""
    rows = {"image": lambda size: size[0]}
    return lay_out(Weighted(ids, weights), 0, tokenizer=TOKENIZER, rows=rows, max_tokens=max_tokens)


def test_a_weight_stands_beside_the_label_of_its_token() -> None:
    """One row before its token, as the label does; weights of placeholders and of the first token are not used."""
    found = layout([5, IMAGE, 6, 7, IMAGE, 8, END], [9, 9, 0.5, 0, 9, 2, 3])
    assert found.labels.tolist() == [NO_LABEL, 6, 7, NO_LABEL, NO_LABEL, 8, END, NO_LABEL]
    assert found.weights is not None
    assert found.weights.tolist() == [0, 0.5, 0, 0, 0, 2, 3, 0]
    assert found.weights.dtype == "float32"
    assert found.targets.tolist() == [False, True, False, False, False, True, True, False]
    first = layout([IMAGE, 6, END], [9, 0.5, 2])
    assert first.weights is not None
    assert first.weights.tolist() == [0.5, 2, 0]


def test_what_is_cut_takes_its_weights_along() -> None:
    """Of text, and of an item that does not fit with everything after it."""
    for most, expected in ((6, [0, 2, 3, 0, 0, 0]), (5, [0, 2, 3, 0]), (3, [0, 2, 0]), (0, [])):
        found = layout([5, IMAGE, 6, 7, IMAGE, 8, END], [1, 9, 2, 3, 9, 4, 5], max_tokens=most)
        assert found.weights is not None
        assert found.weights.tolist() == expected
        assert len(found.weights) == len(found.tokens)


def test_without_weights_each_label_is_learned() -> None:
    """A dataset that gives none for a sample, and one that has no such method."""
    found = layout([5, 6, END], None)
    assert found.weights is None
    assert found.targets.tolist() == [True, True, False]
    assert pack([found], next_tokens=1).weights is None
    assert pack([found]).label_weight == 2.0


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1, math.nan, 1], "expected weights of tokens from 0 to 3.4e+38, got nan for token 1. Give what is not"),
        ([1, 1, math.inf], "got inf for token 2"),
        ([1, 1, 1e39], "got 1e+39 for token 2"),
        ([-0.5, 1, 1], "got -0.5 for token 0"),
        ([1, 1], "expected one weight for each of its 3 tokens, got 2 weights"),
        ([[1, 1, 1]], "expected one weight for each of its 3 tokens, got weights of shape (1, 3)"),
    ],
)
def test_what_is_no_weight_is_refused_with_its_place(weights: Sequence[float], reason: str) -> None:
    """By file and line."""
    with pytest.raises(DataError, match=rf"^toy\.jsonl:7: .*{re.escape(reason)}"):
        layout([5, 6, END], weights)


SAMPLES = (
    layout([1, 2, 3, IMAGE, 4, 5, END], [1, 0.5, 0, 9, 2, 0.25, 4]),
    layout([7, 8, 9, END], None),
    layout([], None),
    layout([1, 2, END], [0, 0, 0]),
)
ROWS = [0.5, 0, 0, 2, 0.25, 4, 0, 1, 1, 1, 0, 0, 0, 0]
FURTHER: list[list[float]] = [[0, 0, 0, 0.25, 4, 0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]]
SUMS = [(6.75, 3.0, 0.0, 0.0), (4.25, 2.0, 0.0, 0.0), (4.0, 1.0, 0.0, 0.0)]


def test_weights_are_packed_with_their_labels() -> None:
    """Those of labels further on too; labels of samples that give none weigh 1, and those of weight 0 stay labels."""
    packed = pack(SAMPLES, multiple=8, next_tokens=2)
    assert packed.weights is not None
    assert packed.weights.rows.tolist() == [*ROWS, 0, 0]
    assert packed.weights.next_rows.tolist() == [[*each, 0, 0] for each in FURTHER]
    assert [packed.weights.sums, *packed.weights.next_sums] == SUMS
    assert packed.label_weight == 9.75
    assert packed.label_tokens == (4, 3, 0, 0)
    assert packed.targets.tolist() == [weight > 0 for weight in [*ROWS, 0, 0]]
    assert packed.labels[1] == 3
    assert packed.next_counts[0] == (3, 2, 0, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_hold_the_weights_of_their_rows(size: int) -> None:
    """Each with those of its own labels, of samples' sums the same; what ranks add up is the whole."""
    found: dict[tuple[int, int], list[float]] = {}
    total = 0.0
    for rank in range(size):
        own = pack(SAMPLES, multiple=4, context_size=size, context_rank=rank, next_tokens=2)
        assert own.weights is not None
        assert [own.weights.sums, *own.weights.next_sums] == SUMS
        total += own.label_weight
        columns = np.stack([own.weights.rows, *own.weights.next_rows]).T.tolist()
        keys = zip(own.samples.tolist(), own.positions.tolist(), strict=True)
        pairs = dict(zip(keys, columns, strict=True))
        assert pairs.pop((len(SAMPLES), 0), [0, 0, 0]) == [0, 0, 0]
        found |= pairs
    assert [found[key] for key in sorted(found)] == np.array([ROWS, *FURTHER]).T.tolist()
    assert total == 9.75
