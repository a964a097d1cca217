"""Many samples laid out at once: each as it is alone, with a refusal that names the right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import LayoutRules, MadeItem, SampleLayout
from mimo.data.text.byte_tokenizer import ByteTokenizer
from mimo.data.text.placeholders import Placeholders
from mimo.hooks import DataError, ItemInfo

END, IMAGE, SOUND, ARROW = 256, 257, 258, 259
TOKENIZER = ByteTokenizer(placeholders=Placeholders({"image": IMAGE, "audio": SOUND, "action": ARROW}))
MODALITIES = {IMAGE: "image", SOUND: "audio", ARROW: "action"}
RULES = LayoutRules(
    tokenizer=TOKENIZER,
    rows={"image": lambda size: size[0] * 2, "audio": lambda size: size[0]},
    grids={"image": lambda size: (1, size[0], 2)},
    patterns={"image": lambda size: ("<", *((2, "|") * size[0]), ">")},
    made={"audio": MadeItem(), "action": MadeItem(rows=2, reads_own=True)},
)
"""Images have text between their rows, sound is read, made, or both, and actions are made."""


@attrs.frozen
class Line:
    """One sample: bytes, the end, and placeholders."""

    ids: Sequence[int]
    weights: Sequence[float] | None
    ends: Sequence[int] | None
    infos: Sequence[ItemInfo]


@attrs.frozen
class Lines:
    """A dataset of samples that a test drew."""

    lines: Sequence[Line]

    def __len__(self) -> int:
        return len(self.lines)

    def tokens(self, sample: int) -> Sequence[int]:
        return self.lines[sample].ids

    def weights(self, sample: int) -> Sequence[float] | None:
        return self.lines[sample].weights

    def ends(self, sample: int) -> Sequence[int] | None:
        return self.lines[sample].ends

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        return self.lines[sample].infos

    def raw(self, sample: int, index: int) -> object:
        raise AssertionError("a layout never decodes")

    def where(self, sample: int) -> str:
        return f"lines:{sample}"


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Draw a sample, its items in any order."""
    ids = draw(st.lists(st.sampled_from([*range(97, 105), END, IMAGE, SOUND, ARROW]), max_size=12))
    infos = []
    for index, placeholder in enumerate(draw(st.permutations([one for one in ids if one in MODALITIES]))):
        role: Any = draw(st.sampled_from(["", "input", "output", "both"])) if placeholder == SOUND else ""
        size = (draw(st.integers(0, 3)),)
        infos.append(ItemInfo(sample=0, index=index, modality=MODALITIES[placeholder], size=size, role=role))
    weights = draw(st.none() | st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=len(ids), max_size=len(ids)))
    ends = draw(st.none() | st.lists(st.integers(0, len(ids)), max_size=4))
    return Line(ids, weights, ends, infos)


def compared(layout: SampleLayout) -> tuple[object, ...]:
    """Return all that a layout says, to be compared."""
    weights = None if layout.weights is None else layout.weights.tolist()
    return (layout.sample, layout.tokens.tolist(), layout.labels.tolist(), layout.items, layout.truncated, weights)


@given(drawn=st.lists(lines(), max_size=6), max_tokens=st.integers(0, 20), data=st.data())
def test_samples_are_laid_out_together_as_each_is_alone(
    drawn: list[Line], max_tokens: int, data: st.DataObject
) -> None:
    """Whatever is cut, read, made or weighted, and also where samples are empty or asked for twice."""
    dataset = Lines(drawn)
    numbers = data.draw(st.lists(st.sampled_from(range(len(drawn))), max_size=8)) if drawn else []
    found = RULES.lay_out_all(dataset, numbers, max_tokens=max_tokens)
    alone = [RULES.lay_out(dataset, sample, max_tokens=max_tokens) for sample in numbers]
    assert list(map(compared, found)) == list(map(compared, alone))
    assert all(each.tokens.dtype == each.labels.dtype == np.int64 for each in found)


def test_all_of_a_sample_is_read_before_the_next() -> None:
    """A dataset that remembers the sample it has encoded last encodes each once, also one that is cut."""
    asked: list[int] = []

    class Recording(Lines):
        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)

            def recorded(sample: int) -> Any:
                asked.append(sample)
                return found(sample)

            return recorded if name in ("tokens", "weights", "ends", "infos") else found

    dataset = Recording([Line([97] * count, [1.0] * count, [2], ()) for count in (3, 9, 0, 9)])
    found = RULES.lay_out_all(dataset, [3, 0, 1, 2], max_tokens=5)
    assert [len(each.tokens) for each in found] == [2, 3, 2, 0]
    assert [sample for sample, _ in groupby(asked)] == [3, 0, 1, 2]
    assert {sample: asked.count(sample) for sample in range(4)} == {0: 3, 1: 4, 2: 3, 3: 4}


@pytest.mark.parametrize("wrong", [-1, 260])
def test_an_id_that_is_not_the_tokenizers_is_refused_by_its_sample(wrong: int) -> None:
    """Among others, of which some are empty, the first one with such an id is named."""
    texts: list[list[int]] = [[97, 98], [], [97, wrong], [], [wrong], [99]]
    dataset = Lines([Line(ids, None, None, ()) for ids in texts])
    with pytest.raises(DataError) as caught:
        RULES.lay_out_all(dataset, range(len(texts)), max_tokens=9)
    assert str(caught.value) == (
        f"lines:2: expected token ids from 0 to {TOKENIZER.vocabulary - 1}, got {wrong}. "
        "Check that the data was made with this tokenizer."
    )
