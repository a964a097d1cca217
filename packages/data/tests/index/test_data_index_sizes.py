"""Sizes of samples as flat arrays: read back one by one, taken, joined, and every damage that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data.index import (
    DatasetIndex,
    IndexFileError,
    ItemSize,
    JoinedIndex,
    SampleSize,
    SampleSizes,
    arrays_of,
    read_arrays,
    sizes_of_arrays,
    write_arrays,
    write_sizes,
)

MODALITIES = ("audio", "image")
COUNTS = st.integers(0, 9)
ITEMS = st.builds(
    ItemSize,
    modality=st.sampled_from(MODALITIES),
    number=COUNTS,
    size=st.lists(COUNTS, max_size=3).map(tuple),
    rows=COUNTS,
    kept=st.booleans(),
    role=st.sampled_from(["", "input", "output", "both"]),
    asked=COUNTS,
    made_from=COUNTS,
    losses=COUNTS,
)
SAMPLES = st.lists(
    st.builds(
        SampleSize,
        tokens=COUNTS,
        ids=COUNTS,
        targets=COUNTS,
        weight=st.floats(0, 9),
        cut=st.booleans(),
        broken=st.booleans(),
        items=st.lists(ITEMS, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=6,
)
PICTURE = ItemSize(modality="image", number=0, size=(2, 3), rows=2)
SOME = [
    SampleSize(
        tokens=3, ids=2, targets=1, weight=0.5, items=(ItemSize(modality="image", number=0, size=(2, 3), rows=2),)
    ),
    SampleSize(tokens=1, ids=1, targets=0, weight=0.0, broken=True),
]


def listed(sizes: SampleSizes) -> list[SampleSize]:
    """Return the samples one by one."""
    return [sizes[sample] for sample in range(len(sizes))]


@settings(deadline=None, max_examples=50)
@given(st.lists(SAMPLES, min_size=1, max_size=4), st.data())
def test_data_index_sizes_are_those_of_the_samples(parts: list[list[SampleSize]], data: st.DataObject) -> None:
    """Arrays hold what they were made of, whichever are taken, also of several datasets joined."""
    every = [sample for part in parts for sample in part]
    chosen = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=8))
    sizes = [SampleSizes.of(MODALITIES[:: number % 2 * 2 - 1], part) for number, part in enumerate(parts)]
    assert listed(SampleSizes.joined(sizes)) == every
    joined = JoinedIndex(counts=tuple(map(len, parts)), parts=tuple(DatasetIndex(sizes=part) for part in sizes))
    assert [joined.of(sample) for sample in chosen] == [every[sample] for sample in chosen]
    assert [joined.items_of(sample) for sample in chosen] == [every[sample].items for sample in chosen]
    assert [joined.is_broken(sample) for sample in chosen] == [every[sample].broken for sample in chosen]
    taken = joined.take(chosen)
    assert taken is not None
    assert listed(taken) == [every[sample] for sample in chosen]


def test_data_index_sizes_of_a_dataset_without_index_are_unknown() -> None:
    """Of such samples alone, and of any that are asked for together with one."""
    joined = JoinedIndex(counts=(2, 3), parts=(DatasetIndex(sizes=SampleSizes.of(MODALITIES, SOME)), None))
    assert joined.of(1) == SOME[1]
    assert joined.of(2) is None
    assert joined.items_of(2) is None
    assert joined.take([1, 4]) is None
    assert not joined.is_broken(4)


@pytest.mark.parametrize("parts", [[SOME], [SOME, SOME[1:], SOME], [SOME[1:], SOME[1:], SOME, SOME[:1]]])
def test_data_index_sizes_are_written_block_by_block(parts: list[list[SampleSize]], tmp_path: Path) -> None:
    """The file holds all blocks as one."""
    blocks = [SampleSizes.of(MODALITIES, part) for part in parts]
    path = tmp_path / "a.sizes"
    write_sizes(path, range(len(blocks)), blocks.__getitem__, {"data": "digest"})
    stored = read_arrays(path)
    assert stored.about["data"] == "digest"
    assert listed(sizes_of_arrays(stored)) == [sample for part in parts for sample in part]


def damaged(change: dict[str, Sequence[int]]) -> SampleSizes:
    """Return sizes with some arrays replaced."""
    sizes = SampleSizes.of(MODALITIES, SOME)
    arrays: dict[str, Any] = {
        name: np.array(values, dtype=getattr(sizes, name).dtype) for name, values in change.items()
    }
    return attrs.evolve(sizes, **arrays)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"tokens": [3]}, "ids, targets, weight, cut, broken, first_item"),
        ({"rows": []}, "rows"),
        ({"first_item": [0, 1]}, "first_item"),
        ({"first_item": [0, 1, 2]}, "first_item"),
        ({"first_size": [1, 2]}, "first_size"),
    ],
)
def test_data_index_sizes_that_contradict_are_refused(
    change: dict[str, Sequence[int]], wrong: str, tmp_path: Path
) -> None:
    """At opening, where lengths show it."""
    about = {"format": "mimo sizes 1", "modalities": '["audio", "image"]'}
    write_arrays(tmp_path / "a.sizes", arrays_of(damaged(change)), about)
    with pytest.raises(IndexFileError, match=f"contradict each other: {wrong}$"):
        sizes_of_arrays(read_arrays(tmp_path / "a.sizes"))


def test_data_index_sizes_with_offsets_out_of_place_are_refused() -> None:
    """When such a sample is asked for: alone, or with others."""
    sizes = damaged({"first_item": [0, 7, 1], "modality": [9]})
    for ask in (lambda: sizes[0], lambda: sizes.take([0])):
        with pytest.raises(IndexFileError, match="contradict each other: 0 to 7 of 1"):
            ask()
    with pytest.raises(IndexFileError, match="item 0 is of modality 9 of 2"):
        sizes.item(0)
    with pytest.raises(IndexFileError, match="item 0 is of role 4 of 4"):
        damaged({"role": [4]}).item(0)


def test_data_index_sizes_of_a_file_without_roles_have_none(tmp_path: Path) -> None:
    """As files had none once: the samples are as they are in one whose items have no role, and are not made."""
    arrays = arrays_of(SampleSizes.of(MODALITIES, SOME))
    for name in ("role", "asked", "made_from", "losses"):
        del arrays[name]
    write_arrays(tmp_path / "a.sizes", arrays, {"format": "mimo sizes 1", "modalities": '["audio", "image"]'})
    assert listed(sizes_of_arrays(read_arrays(tmp_path / "a.sizes"))) == SOME


@pytest.mark.parametrize(
    ("about", "message"),
    [({}, "it holds no sizes"), ({"format": "mimo sizes 1"}, "modalities"), ({"format": "mimo lines 1"}, "no sizes")],
)
def test_data_index_sizes_of_another_file_are_refused(about: dict[str, str], message: str, tmp_path: Path) -> None:
    """As of one that holds something else."""
    write_arrays(tmp_path / "a.sizes", arrays_of(SampleSizes.of(MODALITIES, SOME)), about)
    with pytest.raises(IndexFileError, match=message):
        sizes_of_arrays(read_arrays(tmp_path / "a.sizes"))
