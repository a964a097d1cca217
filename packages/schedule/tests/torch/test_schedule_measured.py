"""The timeline of a step that was run: bars in their places, and for what each rank waited."""

from __future__ import annotations

import pytest

from mimo.schedule import Action, ActionKind
from mimo.schedule.runtime import Moment, measured
from mimo.topology import Grid, Module, ModuleGraph

GRAPH = ModuleGraph(
    modules=(
        Module(grid=Grid(name="vision", ranks=(0,)), trains=(True,)),
        Module(grid=Grid(name="language", ranks=(1,)), trains=(True,)),
    ),
    arrows=(("vision", "language"),),
)
EDGE = "vision->language"


def _moment(kind: ActionKind, module: str, began: float, ready: float, ended: float) -> Moment:
    edge = EDGE if kind in ("send", "receive") else None
    microbatches = () if kind == "reduce" else (0,)
    action = Action(kind=kind, module=module, stage=0, microbatches=microbatches, edge=edge)
    return Moment(action=action, began=began, ready=ready, ended=ended)


def test_schedule_measured_bars_begin_when_all_is_there() -> None:
    """The encoder waits for the language model; messages are no bars, and count as transfer where ranks wait on."""
    moments = {
        0: [
            _moment("forward", "vision", 100, 100, 102),
            _moment("send", "vision", 102, 102.5, 102.5),
            _moment("backward", "vision", 102.5, 108, 110),
            _moment("reduce", "vision", 110, 110, 111),
        ],
        1: [
            _moment("forward", "language", 100.5, 103, 104),
            _moment("backward", "language", 104.5, 104.5, 107.5),
            _moment("reduce", "language", 107.5, 107.5, 107.75),
        ],
    }
    timeline = measured("step 2", GRAPH, range(3), moments)
    result = [(bar.ranks[0], bar.action.kind, bar.start, bar.finish, bar.waited, bar.cause) for bar in timeline.bars]
    assert result == [
        (0, "forward", 0, 2, 0, ""),
        (0, "backward", 8, 10, 6, "language"),
        (0, "reduce", 10, 11, 0, ""),
        (1, "forward", 3, 4, 3, "warm-up"),
        (1, "backward", 4.5, 7.5, 0.5, "transfer"),
        (1, "reduce", 7.5, 7.75, 0, ""),
    ]
    assert (timeline.name, timeline.ranks, timeline.seconds) == ("step 2", (0, 1, 2), 11)


@pytest.mark.parametrize(("ended", "cause"), [(103.0, "language"), (101.5, "transfer")])
def test_schedule_measured_wait_is_for_work_or_for_its_message(ended: float, cause: str) -> None:
    """For the module if that was still at work when this rank had nothing left to do, otherwise for the transfer."""
    moments = {
        0: [_moment("forward", "vision", 100, 100, 102), _moment("input-gradient", "vision", 102, 104, 105)],
        1: [_moment("input-gradient", "language", 101, 101, ended)],
    }
    assert measured("t", GRAPH, range(2), moments).bars[1].cause == cause
