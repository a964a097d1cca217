"""Where rows lie at the language model must be where packed samples have their placeholders."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import PlacedItem, SampleLayout, pack
from mimo.hooks import ItemInfo
from mimo.trainer.batch.token_shards import TokenCut


def draw_layout(choice: random.Random, sample: int) -> SampleLayout:
    """Draw a sample of texts and items of two modalities between them, some in several runs; token t of it is t."""
    items, at = [], choice.choice([0, 1, 5])
    for index in range(choice.randrange(4)):
        modality, rows = choice.choice(["image", "sound"]), choice.randrange(7)
        info = ItemInfo(sample=sample, index=index, modality=modality, size=(rows,))
        runs, left = [], rows
        for _ in range(choice.choice([1, 1, 3])):
            count = choice.randint(0, left)
            runs.append((at, at + count))
            at, left = at + count + choice.choice([0, 1, 2]), left - count
        runs.append((at, at + left))
        items.append(PlacedItem(info=info, runs=tuple(runs)))
        at += left + choice.choice([0, 1, 4])
    tokens = np.arange(at, dtype=np.int64)
    return SampleLayout(sample=sample, tokens=tokens, labels=tokens, items=tuple(items), truncated=False)


@given(
    choice=st.randoms(use_true_random=False),
    context=st.integers(1, 4),
    slices=st.integers(1, 5),
    samples=st.integers(0, 4),
    multiple=st.sampled_from([1, 1, 3, 64]),
)
def test_rows_lie_where_packed_samples_have_their_placeholders(
    choice: random.Random, context: int, slices: int, samples: int, multiple: int
) -> None:
    """For every context rank, slice with its padding, and modality, in the order in which encoders return the rows."""
    layouts = [draw_layout(choice, sample) for sample in range(samples)]
    lengths = [len(layout.tokens) for layout in layouts]
    cut = TokenCut.of(lengths, context=context, slices=slices, multiple=multiple)
    for modality in ("image", "sound", "none"):
        found = cut.rows(layouts, modality)
        assert found.bounds[0] == 0
        numbers: dict[tuple[int, int], int] = {}  # of a row, by sample and position
        for sample, layout in enumerate(layouts):
            for item in layout.items:
                if item.info.modality == modality:
                    for start, stop in item.runs:
                        for position in range(start, stop):
                            numbers[sample, position] = len(numbers)
        assert found.bounds[-1] == len(numbers)
        for rank in range(context):
            packed = pack(layouts, multiple=slices * multiple, context_size=context, context_rank=rank)
            places = packed.placeholders.get(modality, np.empty(0, dtype=np.int64))
            each = len(packed.tokens) // slices
            for number in range(slices):
                own = places[(places >= number * each) & (places < (number + 1) * each)]
                cell = rank * slices + number
                assert [
                    row
                    for (start, stop), holder in zip(pairwise(found.bounds), found.cells, strict=True)
                    if holder == cell
                    for row in range(start, stop)
                ] == [numbers[int(packed.samples[at]), int(packed.positions[at])] for at in own]
