"""The rows of a timeline: who shares one, and what its time went into."""

from __future__ import annotations

from mimo.schedule import Action, Bar, Timeline
from mimo.schedule.viewer.rows import modules_of, rows_of


def _bar(
    ranks: tuple[int, ...], start: float, finish: float, module: str = "a", *, waited: float = 0, cause: str = ""
) -> Bar:
    action = Action(kind="forward", module=module, stage=0, microbatches=(0,))
    return Bar(ranks=ranks, action=action, start=start, finish=finish, waited=waited, cause=cause)


def test_schedule_rows_are_ranks_that_did_the_same() -> None:
    """A bar of ranks that share one action alone stands in the rows of all of them; idle ranks have a row too."""
    timeline = Timeline(
        name="t", ranks=(0, 1, 2, 3, 4), bars=(_bar((0, 1, 2), 0, 1), _bar((0, 1), 1, 2), _bar((2,), 1, 4))
    )
    rows = rows_of(timeline)
    assert [(row.name, len(row.bars)) for row in rows] == [("ranks 0-1", 2), ("rank 2", 2), ("ranks 3-4", 0)]
    assert [row.busy for row in rows] == [2, 4, 0]
    assert [row.idle for row in rows] == [{"drain": 2}, {}, {"drain": 4}]


def test_schedule_rows_add_up_to_the_step() -> None:
    """Busy and idle by cause; a gap without a cause is unknown."""
    half = 0.5
    bars = (
        _bar((0,), half, 2 * half, waited=half, cause="warm-up"),
        _bar((0,), 4 * half, 5 * half, waited=half, cause="b"),
        _bar((0,), 6 * half, 7 * half),
        _bar((1,), 0, 4, "b"),
    )
    first, _ = rows_of(Timeline(name="t", ranks=(0, 1), bars=bars))
    assert first.idle == {"warm-up": half, "b": half, "unknown": 2 * half, "drain": half}
    assert first.busy + sum(first.idle.values()) == 4
    assert modules_of((Timeline(name="t", ranks=(0, 1), bars=bars),)) == ("a", "b")


def test_schedule_rows_know_their_peak() -> None:
    """Of all modules together, at one moment."""
    memory = {0: ((0.0, {"a": 3, "b": 1}), (1.0, {"a": 1, "b": 2}))}
    (row,) = rows_of(Timeline(name="t", ranks=(0,), bars=(_bar((0,), 0, 1),), memory=memory))
    assert row.peak == 4
