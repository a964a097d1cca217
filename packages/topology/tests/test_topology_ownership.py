"""Who owns which sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.topology import Ownership, count_microbatches


def test_topology_first_lanes_own_one_more() -> None:
    """Seven samples over three lanes are cut 3, 2, 2."""
    owners = Ownership.even(7, 3)
    assert [owners.span(lane) for lane in range(3)] == [range(3), range(3, 5), range(5, 7)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_topology_spans_cover_all_samples_once(samples: int, lanes: int) -> None:
    """Spans are contiguous, cover all samples, differ by at most one, and `lane_of` agrees; a lane may be empty."""
    owners = Ownership.even(samples, lanes)
    spans = [owners.span(lane) for lane in range(owners.lanes)]
    assert [position for span in spans for position in span] == list(range(samples))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert all(owners.lane_of(position) == lane for lane, span in enumerate(spans) for position in span)


@given(st.data(), st.integers(1, 5))
def test_topology_any_assignment_is_owned_as_it_says(data: st.DataObject, lanes: int) -> None:
    """Each lane has its positions ascending, `lane_of` agrees, and the parts of what is owned are owned with it."""
    chosen = data.draw(st.lists(st.integers(0, lanes - 1), max_size=12))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    owners = Ownership.of(chosen, lanes)
    assert owners.lanes == lanes
    for lane in range(lanes):
        assert list(owners.span(lane)) == [position for position, other in enumerate(chosen) if other == lane]
    assert [owners.lane_of(position) for position in range(len(chosen))] == chosen
    parts = [lane for lane, size in zip(chosen, sizes, strict=True) for _ in range(size)]
    assert [owners.scaled(sizes).lane_of(position) for position in range(len(parts))] == parts
    assert Ownership.even(len(chosen), lanes).order is None


def test_topology_a_batch_that_cannot_be_split_is_refused() -> None:
    """Microbatches are whole for every language lane."""
    assert count_microbatches(global_batch=24, micro_batch=4, lanes=3) == 2
    with pytest.raises(
        ConfigError, match=r"run\.global_batch: expected a multiple of .* 4 x 3 = 12, got 20\. Set it to 12"
    ):
        count_microbatches(global_batch=20, micro_batch=4, lanes=3)
