"""A sample cut over the context ranks of its lane."""

from hypothesis import given
from hypothesis import strategies as st

from mimo.topology import context_spans


def rows_of(length: int, size: int, rank: int) -> list[int]:
    """Return the rows that lie on a rank."""
    return [row for span in context_spans(length, size=size, rank=rank) for row in range(*span)]


def test_topology_a_rank_holds_an_early_and_a_late_chunk() -> None:
    """Eleven rows over two ranks are cut 3, 3, 3, 2; the middle chunks are neighbours and come as one span."""
    assert context_spans(11, size=2, rank=0) == ((0, 3), (9, 11))
    assert context_spans(11, size=2, rank=1) == ((3, 9),)


def test_topology_one_rank_holds_a_sample_whole() -> None:
    """There is then nothing to cut."""
    assert context_spans(7, size=1, rank=0) == ((0, 7),)


def test_topology_a_sample_shorter_than_its_chunks_leaves_ranks_empty() -> None:
    """Two rows over four ranks: no span is empty, and two ranks have none."""
    assert [context_spans(2, size=4, rank=rank) for rank in range(4)] == [((0, 1),), ((1, 2),), (), ()]


@given(st.integers(1, 9))
def test_topology_an_empty_sample_has_no_spans(size: int) -> None:
    """On no rank, one alone included."""
    assert all(context_spans(0, size=size, rank=rank) == () for rank in range(size))


@given(st.integers(0, 300), st.integers(1, 9))
def test_topology_context_spans_partition_the_sample(length: int, size: int) -> None:
    """Every row lies on exactly one rank; spans ascend, are not empty, never touch, and are two at most."""
    assert sorted(row for rank in range(size) for row in rows_of(length, size, rank)) == list(range(length))
    for rank in range(size):
        spans = context_spans(length, size=size, rank=rank)
        assert len(spans) <= 2
        bounds = [bound for span in spans for bound in span]
        assert bounds == sorted(set(bounds))


@given(st.integers(0, 300), st.integers(1, 9))
def test_topology_causal_work_is_even_over_context_ranks(length: int, size: int) -> None:
    """A row looks at itself and all before it: ranks differ by less than two rows that look at the whole sample."""
    work = [sum(row + 1 for row in rows_of(length, size, rank)) for rank in range(size)]
    assert max(work) - min(work) <= 2 * length
    rows = [len(rows_of(length, size, rank)) for rank in range(size)]
    assert max(rows) - min(rows) <= 1
