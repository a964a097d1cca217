"""Ids of samples as flat arrays: read back one by one, written in blocks, and every damage that is refused."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data.index import (
    DatasetIndex,
    IndexFileError,
    JoinedIndex,
    SampleSize,
    SampleSizes,
    SampleTokens,
    TokenArrays,
    arrays_of_tokens,
    read_arrays,
    tokens_of_arrays,
    tokens_of_file,
    write_arrays,
    write_tokens,
)

SMALLEST = float(np.finfo(np.float32).tiny)


@st.composite
def samples(draw: st.DrawFn) -> SampleTokens:
    """Draw the ids of a sample, some with weights, and some with places where they may be cut."""
    ids = draw(st.lists(st.integers(-1, 1 << 24), max_size=6))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, SMALLEST]), min_size=len(ids), max_size=len(ids)))
    ends = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=3)))
    return SampleTokens(
        ids=np.array(ids, dtype=np.int32),
        weights=np.array(weights, dtype=np.float32) if draw(st.booleans()) else None,
        ends=np.array(ends, dtype=np.int32) if draw(st.booleans()) else None,
    )


PARTS = st.lists(st.lists(samples(), min_size=1, max_size=4), min_size=1, max_size=3)
SOME = [
    SampleTokens(ids=np.array([5, 6, 7], dtype=np.int32), weights=np.array([0, 1, 1], dtype=np.float32)),
    SampleTokens(ids=np.array([8], dtype=np.int32), ends=np.array([1], dtype=np.int32)),
]


def plain(tokens: SampleTokens) -> tuple[list[int] | list[float] | None, ...]:
    """Return the numbers of a sample."""
    found = (tokens.ids, tokens.weights, tokens.ends)
    return tuple(None if array is None else array.tolist() for array in found)


def written(parts: Sequence[Sequence[SampleTokens]], path: Path) -> TokenArrays:
    """Return the ids of blocks, read from their file."""
    blocks = [TokenArrays.of(part) for part in parts]
    write_tokens(path, range(len(blocks)), blocks.__getitem__, {"data": "digest"})
    stored = read_arrays(path)
    assert stored.about == {"format": "mimo tokens 1", "data": "digest"}
    return tokens_of_file(stored)


@settings(deadline=None, max_examples=50)
@given(PARTS)
def test_data_index_tokens_are_those_of_the_samples(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[SampleTokens]]
) -> None:
    """A file of some blocks holds all that they were made of, to the bit."""
    tokens = written(parts, tmp_path_factory.mktemp("tokens") / "a.tokens")
    assert [plain(tokens[sample]) for sample in range(len(tokens))] == [plain(one) for part in parts for one in part]
    assert {tokens[sample].ids.dtype for sample in range(len(tokens))} == {np.dtype(np.int32)}


def test_data_index_tokens_are_found_by_dataset() -> None:
    """Of several, whose samples are numbered one dataset after another; None of one whose ids aren't kept."""
    sizes = sizes_of(SOME)
    kept = DatasetIndex(sizes=sizes, tokens=TokenArrays.of(SOME))
    joined = JoinedIndex(counts=(2, 2, 2), parts=(DatasetIndex(sizes=sizes), kept, None))
    found = [joined.tokens_of(sample) for sample in range(6)]
    assert [None if one is None else plain(one) for one in found] == [None, None, *map(plain, SOME), None, None]
    assert joined.keeps_tokens
    assert not JoinedIndex(counts=(2, 2), parts=(DatasetIndex(sizes=sizes), None)).keeps_tokens


def sizes_of(samples: Sequence[SampleTokens]) -> SampleSizes:
    """Return the sizes of samples, of which only the number of ids matters."""
    return SampleSizes.of((), [SampleSize(tokens=0, ids=len(one.ids), targets=0, weight=0.0) for one in samples])


def test_data_index_tokens_of_other_sizes_are_refused() -> None:
    """As where a command was killed after it had written one of the two files."""
    index = DatasetIndex(sizes=sizes_of(SOME[::-1]), tokens=TokenArrays.of(SOME))
    with pytest.raises(IndexFileError, match="3 ids of sample 0 are kept, and its sizes are those of 1"):
        index.tokens_of(0)


@pytest.mark.parametrize("runs", [[-1, 4], [2, 2], [1 << 30, 1 << 30]])
def test_data_index_tokens_with_weights_of_others_are_refused(runs: list[int]) -> None:
    """Before anything is made of them: a small file can't ask for much memory."""
    arrays = TokenArrays.of(SOME)
    run = np.array(runs, dtype=np.int32)
    check = arrays.check.copy()
    check[0] = zlib.crc32(SOME[0].ids.tobytes() + run.tobytes() + arrays.run_weight.tobytes())
    with pytest.raises(IndexFileError, match="sample 0 has 3 ids, and weights of others"):
        attrs.evolve(arrays, run=run, check=check)[0]


@pytest.mark.parametrize("ends", [[-1], [2], [1, 0], [1, 1], [0, 1, -1], [1 << 30, 1]])
def test_data_index_tokens_that_may_be_cut_elsewhere_are_refused(ends: list[int]) -> None:
    """Numbers of ids that a sample of one hasn't, or that don't ascend; both ends of it may be cut at."""
    whole = attrs.evolve(SOME[1], ends=np.array([0, 1], dtype=np.int32))
    assert plain(TokenArrays.of([whole])[0]) == plain(whole)
    tokens = TokenArrays.of([SOME[0], attrs.evolve(SOME[1], ends=np.array(ends, dtype=np.int32))])
    with pytest.raises(IndexFileError, match="sample 1 has 1 ids, and may be cut where none is"):
        tokens[1]
    assert plain(tokens[0]) == plain(SOME[0])


@pytest.mark.parametrize("name", ["id", "run", "run_weight", "end"])
def test_data_index_tokens_with_a_wrong_bit_are_refused(name: str, tmp_path: Path) -> None:
    """When their sample is read: the others are sound."""
    arrays = arrays_of_tokens(TokenArrays.of([*SOME, *SOME]))
    arrays[name].view(np.int32)[0] ^= 1 << 20
    write_arrays(tmp_path / "a.tokens", arrays, {})
    tokens = tokens_of_arrays(read_arrays(tmp_path / "a.tokens"))
    wrong = int(name == "end")
    with pytest.raises(IndexFileError, match=f"the ids of sample {wrong} differ from their checksum"):
        tokens[wrong]
    assert [plain(tokens[sample]) for sample in (2, 3)] == [plain(one) for one in SOME]


@pytest.mark.parametrize(
    ("name", "values", "wrong"),
    [
        ("check", [0], "first_id, first_run, first_end"),
        ("id", [5], "first_id"),
        ("first_id", [0, 4], "first_id"),
        ("first_end", [1, 1, 2], "first_end"),
        ("run_weight", [], "run, run_weight"),
    ],
)
def test_data_index_tokens_that_contradict_are_refused(
    name: str, values: list[int], wrong: str, tmp_path: Path
) -> None:
    """At opening, where lengths show it."""
    arrays = arrays_of_tokens(TokenArrays.of(SOME))
    arrays[name] = np.array(values, dtype=arrays[name].dtype)
    write_arrays(tmp_path / "a.tokens", arrays, {})
    with pytest.raises(IndexFileError, match=f"contradict each other: {wrong}$"):
        tokens_of_arrays(read_arrays(tmp_path / "a.tokens"))


def test_data_index_tokens_of_another_file_are_refused(tmp_path: Path) -> None:
    """One of another form, one that lacks an array, or one with offsets that lead out of it."""
    arrays = arrays_of_tokens(TokenArrays.of(SOME))
    write_arrays(tmp_path / "a.tokens", arrays, {"format": "mimo tokens 99"})
    with pytest.raises(IndexFileError, match="holds no ids of samples"):
        tokens_of_file(read_arrays(tmp_path / "a.tokens"))
    write_arrays(tmp_path / "a.tokens", {"id": arrays["id"]}, {})
    with pytest.raises(IndexFileError, match=r"lacks what ids of samples have \(KeyError\('first_id'\)\)"):
        tokens_of_arrays(read_arrays(tmp_path / "a.tokens"))
    arrays["first_id"][1] = 9
    write_arrays(tmp_path / "b.tokens", arrays, {})
    with pytest.raises(IndexFileError, match="contradict each other: 0 to 9 of 4"):
        tokens_of_arrays(read_arrays(tmp_path / "b.tokens"))[0]
