"""The small parts alone: boxes that cover a tensor, and checksums of data in pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mimo.checkpoint._blocks import BlockHasher, checksum
from mimo.checkpoint._boxes import Box, covers_once
from mimo.checkpoint._manifest import ShardEntry
from mimo.checkpoint._reader import ShardReader

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


def test_any_range_is_read_in_any_order(tmp_path: Path) -> None:
    """Ranges inside one block, over several, and again in a block read before give the file's bytes."""
    data = bytes(range(256)) * 20
    (tmp_path / "x").write_bytes(b"header..." + data)
    blocks = tuple(checksum(data[at : at + 1000]) for at in range(0, len(data), 1000))
    entry = ShardEntry(bytes=9 + len(data), header_bytes=9, header_checksum=checksum(b"header..."), blocks=blocks)
    spots = (0, 1, 999, 1000, 1001, 2500, 4999, 5000, 5119, 5120)
    with ShardReader(tmp_path / "x", entry, 1000) as reader:
        for before in itertools.combinations(spots, 2):
            for low, high in itertools.combinations_with_replacement(spots, 2):
                reader.read(9 + before[0], 9 + before[1])
                assert reader.read(9 + low, 9 + high) == data[low:high]


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=6))
def test_checksums_do_not_depend_on_how_data_arrives(data: bytes, cuts: list[int]) -> None:
    """Blocks are of fixed length whatever the pieces, and the last may be short."""
    hasher = BlockHasher(block_bytes=7)
    for low, high in itertools.pairwise([0, *sorted(cuts), 100]):
        hasher.update(memoryview(data)[low:high])
    assert hasher.finish() == tuple(checksum(data[at : at + 7]) for at in range(0, len(data), 7))
