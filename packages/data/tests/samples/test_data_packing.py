"""Packing: order, padding and emptiness."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from mimo.data import NO_LABEL, PlacedItem, SampleLayout, pack
from mimo.hooks import ItemInfo


def layout(tokens: list[int], *items: tuple[str, int, int]) -> SampleLayout:
    """Return a layout with items (modality, start, rows); labels are the tokens plus 100, to be told apart."""
    return SampleLayout(
        sample=0,
        tokens=np.array(tokens, dtype=np.int64),
        labels=np.array(tokens, dtype=np.int64) + 100,
        items=tuple(
            PlacedItem(info=ItemInfo(sample=0, index=i, modality=modality, size=(1,)), runs=((start, start + rows),))
            for i, (modality, start, rows) in enumerate(items)
        ),
        truncated=False,
    )


def test_data_pack_lays_samples_end_to_end() -> None:
    """Positions restart with each sample, rows are found sample by sample, padding has no label and no length."""
    packed = pack([layout([9, 9, 1], ("image", 0, 2)), layout([2]), layout([3, 8, 9], ("image", 2, 1))], multiple=4)
    assert packed.tokens.tolist() == [9, 9, 1, 2, 3, 8, 9, 0]
    assert packed.labels.tolist() == [109, 109, 101, 102, 103, 108, 109, NO_LABEL]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    assert packed.lengths == (3, 1, 3)
    assert {modality: found.tolist() for modality, found in packed.placeholders.items()} == {"image": [0, 1, 6]}
    arrays = (packed.tokens, packed.labels, packed.positions, packed.placeholders["image"])
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}


def test_data_pack_keeps_modalities_apart() -> None:
    """Each modality has its own positions, item by item."""
    packed = pack([layout([7, 8, 8, 7], ("audio", 0, 1), ("image", 1, 2), ("audio", 3, 1))])
    assert packed.placeholders["audio"].tolist() == [0, 3]
    assert packed.placeholders["image"].tolist() == [1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_data_pack_says_which_rows_are_one_items(rank: int) -> None:
    """Where it is asked for, of whole samples on every context rank; an item without rows is none."""
    samples = [layout([9, 9, 1, 9], ("image", 0, 2), ("image", 3, 1)), layout([2]), layout([3, 8], ("audio", 1, 0))]
    packed = pack(samples, context_size=2, context_rank=rank, with_items=True)
    assert packed.items == (((0, 2), (3, 4)), (), ())
    assert pack(samples).items == ()


def test_data_pack_parts_an_item_at_its_text() -> None:
    """Its rows on either side are two items for those that see each other, as in the library; none is lost."""
    tiled = layout([1, 9, 9, 2, 9, 3], ("image", 1, 3))
    tiled = attrs.evolve(tiled, items=(attrs.evolve(tiled.items[0], runs=((1, 3), (4, 5))),))
    packed = pack([tiled], with_items=True)
    assert packed.items == (((1, 3), (4, 5)),)
    assert packed.placeholders["image"].tolist() == [1, 2, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_data_pack_cuts_places_in_grids_with_their_rows(rank: int) -> None:
    """Each context rank has its rows' places; samples without a grid count as text, and padding is 0."""
    pictured, plain = layout([9, 9, 9, 9, 1, 2], ("image", 0, 4)), layout([3, 4, 5])
    item = attrs.evolve(pictured.items[0], grid=(1, 2, 2))
    pictured = attrs.evolve(pictured, items=(item,))
    whole = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [2, 2, 2], [3, 3, 3]]
    packed = pack([pictured, plain], multiple=4, context_size=2, context_rank=rank)
    assert packed.grid_positions is not None
    wanted = [
        whole[position] if sample == 0 else [position] * 3 if sample == 1 else [0] * 3
        for sample, position in zip(packed.samples.tolist(), packed.positions.tolist(), strict=True)
    ]
    assert packed.grid_positions.tolist() == wanted
    assert pack([plain]).grid_positions is None
    assert pack([]).grid_positions is None


def test_data_pack_nothing() -> None:
    """No sample, and samples of no token, give T = 0 for any multiple."""
    assert pack([], multiple=8).tokens.tolist() == []
    packed = pack([layout([], ("image", 0, 0)), layout([])], multiple=8)
    assert packed.tokens.tolist() == packed.labels.tolist() == packed.positions.tolist() == []
    assert packed.lengths == (0, 0)
    assert packed.placeholders["image"].tolist() == []


@pytest.mark.parametrize(
    ("rank", "tokens", "positions", "samples", "image"),
    [
        (0, [1, 9, 9, 2, 5, 0], [0, 1, 4, 0, 0, 0], [0, 0, 0, 1, 2, 3], [1, 2]),
        (1, [9, 9, 3, 9], [2, 3, 1, 2], [0, 0, 1, 1], [0, 1, 3]),
    ],
)
def test_data_pack_cuts_each_sample_over_context_ranks(
    rank: int, tokens: list[int], positions: list[int], samples: list[int], image: list[int]
) -> None:
    """A rank has its spans of each sample, of items too; lengths and label tokens are those of whole samples."""
    layouts = [layout([1, 9, 9, 9, 9], ("image", 1, 4)), layout([2, 3, 9], ("image", 2, 1)), layout([5])]
    layouts[0].labels[3] = NO_LABEL
    packed = pack(layouts, multiple=2, context_size=2, context_rank=rank)
    assert packed.tokens.tolist() == tokens
    own = zip(samples, positions, strict=True)
    labels = [layouts[sample].labels[at] if sample < len(layouts) else NO_LABEL for sample, at in own]
    assert packed.labels.tolist() == labels
    assert packed.positions.tolist() == positions
    assert packed.samples.tolist() == samples
    assert packed.placeholders["image"].tolist() == image
    assert packed.lengths == (5, 3, 1)
    assert packed.label_tokens == (4, 3, 1)


@pytest.mark.parametrize(("multiple", "padded"), [(1, 5), (2, 6), (3, 6), (5, 5), (8, 8)])
def test_data_pack_pads_to_multiple(multiple: int, padded: int) -> None:
    """T is the next multiple."""
    packed = pack([layout([1, 2, 3]), layout([4, 5])], multiple=multiple)
    assert len(packed.tokens) == len(packed.labels) == len(packed.positions) == padded
    assert packed.labels[5:].tolist() == [NO_LABEL] * (padded - 5)


def test_data_pack_refuses_multiple_of_none() -> None:
    """A multiple below 1 is a mistake of the caller."""
    with pytest.raises(ValueError, match="multiple: expected at least 1, got 0"):
        pack([], multiple=0)
