"""The small parts alone: boxes that cover a tensor, and checksums of data in pieces."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from operator import add
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.checkpoint._blocks import BlockHasher, checksum
from mimo.checkpoint._boxes import Box, boxes_between, covers_once, intersect
from mimo.checkpoint._manifest import ShardEntry
from mimo.checkpoint._reader import ShardReader, make_slab

CUTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=0, max_size=3)


def cut(sizes: list[list[int]]) -> tuple[tuple[int, ...], list[Box]]:
    """Make a tensor's shape and the boxes of a grid whose parts have these sizes along each dim."""
    starts = [[0, *itertools.accumulate(along)][:-1] for along in sizes]
    boxes = [
        Box(
            tuple(starts[dim][at] for dim, at in enumerate(index)),
            tuple(sizes[dim][at] for dim, at in enumerate(index)),
        )
        for index in itertools.product(*(range(len(along)) for along in sizes))
    ]
    return tuple(sum(along) for along in sizes), boxes


@given(CUTS, st.randoms())
def test_the_parts_of_a_grid_cover_a_tensor_once(sizes: list[list[int]], random: object) -> None:
    """Any grid of parts, empty ones too, in any order, is a cover."""
    shape, boxes = cut(sizes)
    random.shuffle(boxes)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert covers_once(shape, boxes)


@given(CUTS, st.integers(0, 63))
def test_a_part_too_few_or_too_many_is_noticed(sizes: list[list[int]], index: int) -> None:
    """Leaving out a part, giving one twice in its own or another's place, or moving it, is no cover."""
    shape, boxes = cut(sizes)
    index %= len(boxes)
    part = boxes[index]
    if not part.elements:
        return
    rest = boxes[:index] + boxes[index + 1 :]
    assert not covers_once(shape, rest)
    assert not covers_once(shape, [*boxes, part])
    for other in rest:
        if other.elements == part.elements:
            assert not covers_once(shape, [*rest, other])
    for dim in range(len(shape)):
        moved = tuple(low + (along == dim) for along, low in enumerate(part.offset))
        assert not covers_once(shape, [*rest, Box(moved, part.shape)])


def test_boxes_of_other_dims_or_below_zero_are_no_cover() -> None:
    """A box must have the tensor's dims and lie inside it."""
    assert not covers_once((4,), [Box((0, 0), (4, 1))])
    assert not covers_once((4,), [Box((-1,), (4,))])
    assert not covers_once((2, 2), [Box((0, 0), (-2, -2))])


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 256), st.integers(0, 256))
def test_a_range_of_elements_is_cut_into_boxes(shape: list[int], low: int, high: int) -> None:
    """The boxes hold each element of the range once, and no other; they are as few as two for each dim but one."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    low, high = min(low, whole.numel()), min(high, whole.numel())
    boxes = list(boxes_between(Box((0,) * len(shape), tuple(shape)), low, high))
    found = [whole[tuple(map(slice, box.offset, map(add, box.offset, box.shape)))].flatten() for box in boxes]
    assert sorted(torch.cat([torch.empty(0), *found]).tolist()) == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_a_box_keep_its_place() -> None:
    """Places are those of the tensor, not of the box that is cut."""
    box = Box((3, 1), (2, 4))
    assert list(boxes_between(box, 2, 8)) == [Box((4, 1), (1, 4)), Box((3, 3), (1, 2))]
    assert box.find((4, 2)) == 5
    assert Box((4, 2), (1, 3)).slices(box) == (slice(1, 2), slice(1, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=3))
def test_what_two_boxes_have_in_common(dims: list[tuple[int, int, int, int]]) -> None:
    """It is what is marked twice."""
    marks = torch.zeros([8] * len(dims), dtype=torch.int)
    one = Box(tuple(dim[0] for dim in dims), tuple(dim[1] for dim in dims))
    other = Box(tuple(dim[2] for dim in dims), tuple(dim[3] for dim in dims))
    for box in (one, other):
        marks[tuple(map(slice, box.offset, map(add, box.offset, box.shape)))] += 1
    found = intersect(one, other)
    assert (marks == 2).sum() == (0 if found is None else found.elements)
    if found is not None:
        assert (marks[tuple(map(slice, found.offset, map(add, found.offset, found.shape)))] == 2).all()


def test_blocks_are_read_in_any_order(tmp_path: Path) -> None:
    """Blocks come from the slab or go to their places, one twice or another between; ranges name those they touch."""
    data = bytes(range(256)) * 20
    (tmp_path / "x").write_bytes(b"header..." + data)
    blocks = tuple(checksum(data[at : at + 1000]) for at in range(0, len(data), 1000))
    entry = ShardEntry(bytes=9 + len(data), header_bytes=9, header_checksum=checksum(b"header..."), blocks=blocks)
    with ShardReader(tmp_path / "x", entry, make_slab(1000)) as reader:
        for index in (0, 5, 5, 3, 0):
            low, high = reader.span(index)
            assert reader.read(index) == data[low - 9 : high - 9]
            target = bytearray(high - low)
            reader.read_into(index, [(low, memoryview(target))])
            assert target == data[low - 9 : high - 9]
            parts = [(at, memoryview(bytearray(min(300, high - at)))) for at in range(low, high, 300)]
            reader.read_into(index, parts[1:])
            reader.read_into(index, parts)
            assert b"".join(part for _, part in parts) == data[low - 9 : high - 9]
        for low, high in itertools.combinations((0, 1, 999, 1000, 1001, 2500, 4999, 5000, 5119, 5120), 2):
            assert list(reader.blocks(9 + low, 9 + high)) == sorted({at // 1000 for at in range(low, high)})
        assert not reader.blocks(9, 9)


@pytest.mark.parametrize("most", [1, 299, 300, 301, 950])
def test_reads_that_end_early_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A system may give fewer bytes than are asked for, in the middle of a part or at its end."""
    data = bytes(range(250)) * 4
    (tmp_path / "x").write_bytes(b"header..." + data)
    entry = ShardEntry(bytes=1009, header_bytes=9, header_checksum=checksum(b"header..."), blocks=(checksum(data),))
    real = os.preadv

    def preadv(file: int, parts: Sequence[memoryview], offset: int) -> int:
        left = list(itertools.accumulate([most, *map(len, parts)], lambda left, size: max(0, left - size)))
        return real(file, [part[:size] for part, size in zip(parts, left, strict=False)], offset)

    monkeypatch.setattr("os.preadv", preadv)
    parts = [(9 + at, memoryview(bytearray(min(300, 1000 - at)))) for at in range(0, 1000, 300)]
    with ShardReader(tmp_path / "x", entry, make_slab(1000)) as reader:
        reader.read_into(0, parts)
    assert b"".join(part for _, part in parts) == data


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=6))
def test_checksums_do_not_depend_on_how_data_arrives(data: bytes, cuts: list[int]) -> None:
    """Blocks are of fixed length whatever the pieces, and the last may be short."""
    hasher = BlockHasher(block_bytes=7)
    for low, high in itertools.pairwise([0, *sorted(cuts), 100]):
        hasher.update(memoryview(data)[low:high])
    assert hasher.finish() == tuple(checksum(data[at : at + 7]) for at in range(0, len(data), 7))
