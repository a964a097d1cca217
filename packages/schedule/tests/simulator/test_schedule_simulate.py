"""The simulator by itself: who begins when, what ranks wait for, and what they keep meanwhile."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo.hooks import PlanError
from mimo.schedule import (
    Action,
    ActorPlan,
    Bar,
    Costs,
    Link,
    Peak,
    Plan,
    Seconds,
    Simulation,
    StageCost,
    check,
    in_flight,
    peak_activations,
    simulate,
)
from mimo.schedule.viewer.rows import rows_of
from mimo.topology import Edge, Grid, Module, ModuleGraph, StageId

Cases = st.SearchStrategy[Any]
some = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def _plan(microbatches: int, **lists: str) -> Plan:
    """Return a plan from lists keyed ``ranks_0_1`` of ``F B I W S R`` with module and stage, microbatches and edge.

    ``F:v0:0,1`` is a forward of v.0, ``S:v0:0:v->l`` a send, ``+:v0`` a reduction.
    """
    kinds: dict[str, Any] = {
        "F": "forward",
        "B": "backward",
        "I": "input-gradient",
        "W": "weight-gradient",
        "S": "send",
        "R": "receive",
        "+": "reduce",
    }

    def action(text: str) -> Action:
        kind, stage, served, edge = (*text.split(":"), "", "")[:4]
        microbatches = tuple(int(each) for each in served.split(",") if each)
        return Action(
            kind=kinds[kind], module=stage[0], stage=int(stage[1:]), microbatches=microbatches, edge=edge or None
        )

    return Plan(
        schedule="by hand",
        microbatches=microbatches,
        actors=tuple(
            ActorPlan(
                ranks=tuple(int(rank) for rank in name.split("_")[1:]),
                actions=tuple(action(text) for text in texts.split()),
            )
            for name, texts in lists.items()
        ),
    )


def _modules(*, frozen: bool = True, **grids: Any) -> ModuleGraph:
    """Return ``v`` that feeds ``l``, each on the ranks given, or of the sizes given."""
    sizes = {name: given if isinstance(given, dict) else {"ranks": given} for name, given in grids.items()}
    return ModuleGraph(
        modules=tuple(
            Module(grid=Grid(name=name, **each), trains=(not frozen,) * each.get("pp", 1))
            for name, each in sizes.items()
        ),
        arrows=(("v", "l"),) if len(grids) > 1 else (),
    )


def _costs(graph: ModuleGraph, **seconds: Any) -> Costs:
    """Return costs with forwards as given by module, and messages of 1 byte on the boundary."""
    stages = {stage: StageCost(forward=Seconds(each=seconds[stage.module])) for stage in graph.stages}
    return Costs(stages=stages, message_bytes={"v->l": 1})


def _link(latency: Any, bandwidth: Any = float("inf")) -> Link:
    return Link(latency, bandwidth)


def _bars(result: Simulation, rank: int) -> list[tuple[str, float, float, str]]:
    """Return start and finish of a rank's bars with what it waited for before."""
    return [
        (f"{bar.action.kind[0].upper()}:{bar.action.module}{bar.action.stage}", bar.start, bar.finish, bar.cause)
        for bar in result.timeline.bars
        if rank in bar.ranks
    ]


TWO = {"ranks_0": "F:v0:0 S:v0:0:v->l F:v0:1 S:v0:1:v->l", "ranks_1": "R:l0:0:v->l R:l0:1:v->l F:l0:0 F:l0:1"}


def test_a_message_travels_while_its_sender_continues() -> None:
    """With overlap a send takes its sender no time; the receiver waits for the sender first, then for the message."""
    graph = _modules(v=(0,), l=(1,))
    costs = attrs.evolve(_costs(graph, v=10, l=2), link=Link(latency=3))
    result = simulate(_plan(2, **TWO), graph, costs)
    assert _bars(result, 0) == [("F:v0", 0, 10, ""), ("F:v0", 10, 20, "")]
    assert _bars(result, 1) == [("F:l0", 13, 15, "warm-up"), ("F:l0", 23, 25, "v")]
    assert result.bubbles == {0: {"drain": 5}, 1: {"warm-up": 13, "v": 5, "transfer": 3}}
    assert [(each.start, each.finish) for each in result.timeline.transfers] == [(10, 13), (20, 23)]
    assert [(each.sources, each.targets) for each in result.timeline.transfers] == [((0,), (1,))] * 2
    assert result.seconds == 25
    assert (result.bubble, result.work) == (0, {0: 20, 1: 4})


def test_messages_of_an_edge_go_one_after_the_other() -> None:
    """What is sent while an earlier message is on its way waits for it; the bytes of a message take their time."""
    graph = _modules(v=(0,), l=(1,))
    costs = attrs.evolve(_costs(graph, v=1, l=1), message_bytes={"v->l": 6}, link=_link(Fraction(1, 2), Fraction(2)))
    result = simulate(_plan(2, **TWO), graph, costs)
    assert [(each.start, each.finish) for each in result.timeline.transfers] == [
        (1, Fraction(9, 2)),
        (Fraction(9, 2), 8),
    ]
    assert _bars(result, 1)[1] == ("F:l0", 8, 9, "transfer")


def test_a_message_waits_until_it_is_posted() -> None:
    """It leaves no earlier than its receiver posts it, and holds up what the same sender sends after it."""
    graph = _modules(v=(0,), l=(1,))
    costs = attrs.evolve(_costs(graph, v=1, l=20), link=Link(latency=3))
    late = {**TWO, "ranks_1": "R:l0:0:v->l F:l0:0 R:l0:1:v->l F:l0:1"}
    result = simulate(_plan(2, **late), graph, costs)
    assert [each.start for each in result.timeline.transfers] == [1, 24]
    assert _bars(result, 1)[1] == ("F:l0", 27, 47, "transfer")


def test_without_overlap_messages_keep_both_ends_busy() -> None:
    """The sender continues when its message has arrived; a receiver that was busy takes as long before it uses it."""
    graph = _modules(v=(0,), l=(1,))
    costs = attrs.evolve(_costs(graph, v=10, l=20), link=Link(latency=3), overlaps=False)
    result = simulate(_plan(2, **TWO), graph, costs)
    assert _bars(result, 0) == [("F:v0", 0, 10, ""), ("F:v0", 13, 23, "transfer")]
    assert _bars(result, 1) == [("F:l0", 13, 33, "warm-up"), ("F:l0", 36, 56, "transfer")]
    assert result.bubbles[0] == {"transfer": 3, "drain": 33}


def test_without_overlap_a_sender_waits_for_its_receiver() -> None:
    """It names the module that has not come to its post."""
    graph = _modules(v=(0,), l=(1,))
    costs = attrs.evolve(_costs(graph, v=1, l=20), link=Link(latency=3), overlaps=False)
    late = {
        "ranks_0": "F:v0:0 S:v0:0:v->l F:v0:1 S:v0:1:v->l F:v0:2 S:v0:2:v->l",
        "ranks_1": "R:l0:0:v->l F:l0:0 R:l0:1:v->l F:l0:1 R:l0:2:v->l F:l0:2",
    }
    result = simulate(_plan(3, **late), graph, costs)
    assert _bars(result, 0)[2] == ("F:v0", 27, 28, "l")
    assert result.bubbles[0] == {"l": 19, "transfer": 6, "drain": 42}


@pytest.mark.parametrize(("layout", "start"), [({"dp": 2}, 10), ({"tp": 2}, 13)])
def test_rows_that_stay_take_no_time(layout: dict[str, int], start: int) -> None:
    """Where both ends of an edge lie on the same ranks in the same layout nothing crosses, whatever a message takes."""
    graph = _modules(v={"ranks": (0, 1), "dp": 2}, l={"ranks": (0, 1), **layout})
    costs = attrs.evolve(_costs(graph, v=10, l=2), link=Link(latency=3))
    result = simulate(_plan(1, ranks_0_1="R:l0:0:v->l F:v0:0 S:v0:0:v->l F:l0:0"), graph, costs)
    assert _bars(result, 1) == [("F:v0", 0, 10, ""), ("F:l0", start, start + 2, "transfer" if start > 10 else "")]
    assert bool(result.timeline.transfers) == (start > 10)


def test_a_turn_on_one_rank_takes_no_time() -> None:
    """In a V the stages on both sides of the turn lie on the same rank."""
    module = Module(grid=Grid(name="l", ranks=(0, 1), pp=2), trains=(False,) * 4, chunks=2, placement="v")
    graph = ModuleGraph(modules=(module,), arrows=())
    stages = dict.fromkeys(graph.stages, StageCost(forward=Seconds(each=1)))
    costs = Costs(stages=stages, message_bytes={edge.name: 1 for edge in graph.edges}, link=Link(latency=5))
    plan = _plan(
        1,
        ranks_0="F:l0:0 S:l0:0:l.0-1 R:l3:0:l.2-3 F:l3:0",
        ranks_1="R:l1:0:l.0-1 F:l1:0 R:l2:0:l.1-2 S:l1:0:l.1-2 F:l2:0 S:l2:0:l.2-3",
    )
    check(plan, graph)
    result = simulate(plan, graph, costs)
    assert _bars(result, 1) == [("F:l1", 6, 7, "warm-up"), ("F:l2", 7, 8, "")]
    assert _bars(result, 0)[1] == ("F:l3", 13, 14, "l")


@pytest.mark.parametrize(("axis", "start"), [("tp", 5), ("dp", 0)])
def test_ranks_that_meet_begin_together(axis: str, start: int) -> None:
    """Tensor ranks wait for each other inside a computation, lanes only where they reduce."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(False,)),
            Module(grid=Grid(name="l", ranks=(0, 1), **{axis: 2}), trains=(True,)),
        ),
        arrows=(),
    )
    both = "F:l0:0 B:l0:0 +:l0"
    costs = attrs.evolve(Costs.even(graph), stages=_with(Costs.even(graph), v=5, reduce=4))
    result = simulate(_plan(1, ranks_0=f"F:v0:0 {both}", ranks_1=both), graph, costs)
    begun = ("F:l0", start, start + 1, "warm-up" if start else "")
    assert _bars(result, 1)[::2] == [begun, ("R:l0", 8, 12, "" if start else "peers")]
    assert result.bubbles[1] == ({"warm-up": 5} if start else {"peers": 5})


def _with(costs: Costs, *, v: float, reduce: float) -> dict[StageId, StageCost]:
    return {
        stage: attrs.evolve(cost, forward=Seconds(each=v), reduce=0)
        if stage.module == "v"
        else attrs.evolve(cost, reduce=reduce)
        for stage, cost in costs.stages.items()
    }


def test_a_weight_gradient_meets_nobody() -> None:
    """Its tensor ranks do it each when they come to it; forwards and input gradients they do together."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(False,)),
            Module(grid=Grid(name="l", ranks=(0, 1), tp=2), trains=(True,), recompute="full"),
        ),
        arrows=(),
    )
    stages = _with(Costs.even(graph), v=5, reduce=0)
    stages[StageId("l", 0)] = attrs.evolve(stages[StageId("l", 0)], recompute=Seconds(each=2))
    costs = Costs(stages=stages)
    plan = _plan(1, ranks_0="F:l0:0 F:v0:0 I:l0:0 W:l0:0 +:l0", ranks_1="F:l0:0 I:l0:0 W:l0:0 +:l0")
    check(plan, graph)
    assert _bars(simulate(plan, graph, costs), 1)[1:3] == [("I:l0", 6, 9, "peers"), ("W:l0", 9, 10, "")]
    separate = _plan(1, ranks_0="F:l0:0 I:l0:0 F:v0:0 W:l0:0 +:l0", ranks_1="F:l0:0 I:l0:0 W:l0:0 +:l0")
    check(separate, graph)
    assert _bars(simulate(separate, graph, costs), 1)[2:] == [("W:l0", 4, 5, ""), ("R:l0", 10, 10, "peers")]


def test_a_tied_parameter_is_reduced_by_both_its_stages() -> None:
    """The stages at both ends wait for each other, then each for its own ranks."""
    module = Module(grid=Grid(name="l", ranks=(0, 1), pp=2), trains=(True, True), tied=True)
    graph = ModuleGraph(modules=(module,), arrows=())
    costs = Costs.even(graph)
    costs = attrs.evolve(
        costs, stages={stage: attrs.evolve(cost, reduce=3, reduce_tied=2) for stage, cost in costs.stages.items()}
    )
    plan = _plan(
        1,
        ranks_0="F:l0:0 S:l0:0:l.0-1 R:l0:0:l.0-1 B:l0:0 +:l0::l.tied +:l0",
        ranks_1="R:l1:0:l.0-1 F:l1:0 B:l1:0 S:l1:0:l.0-1 +:l1::l.tied +:l1",
    )
    check(plan, graph)
    result = simulate(plan, graph, costs)
    assert _bars(result, 1)[2:] == [("R:l1", 6, 8, "peers"), ("R:l1", 8, 11, "")]
    assert (result.bubble, result.seconds) == (3, 11)


def test_a_pass_of_several_microbatches() -> None:
    """Its forward takes a fixed part once and the rest for each; its messages follow one another, each to its user."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(True,), batch_factor=2),
            Module(grid=Grid(name="l", ranks=(1,)), trains=(True,)),
        ),
        arrows=(("v", "l"),),
    )
    even = Costs.even(graph)
    stages = {**even.stages, StageId("v", 0): StageCost(forward=Seconds(4, 1), input_gradient=Seconds(2, 1))}
    costs = attrs.evolve(even, stages=stages, message_bytes={"v->l": 1}, link=Link(latency=2))
    plan = _plan(
        2,
        ranks_0="F:v0:0,1 S:v0:0:v->l S:v0:1:v->l R:v0:0:v->l R:v0:1:v->l B:v0:0,1 +:v0",
        ranks_1="R:l0:0:v->l R:l0:1:v->l F:l0:0 F:l0:1 B:l0:0 S:l0:0:v->l B:l0:1 S:l0:1:v->l +:l0",
    )
    check(plan, graph)
    result = simulate(plan, graph, costs)
    assert _bars(result, 0)[:2] == [("F:v0", 0, 6, ""), ("B:v0", 17, 21, "l")]
    assert [start for _, start, _, _ in _bars(result, 1)] == [8, 10, 11, 13, 15]


KEEPING = StageCost(
    forward=Seconds(each=4),
    input_gradient=Seconds(each=2),
    weight_gradient=Seconds(each=1),
    recompute=Seconds(each=3),
    activations=100,
    recomputed=40,
    weight_inputs=60,
)


@pytest.mark.parametrize(
    ("texts", "moments", "seconds"),
    [
        ("F:l0:0 B:l0:0 +:l0", [(0, 100), (4, 140), (10, 0)], 10),
        ("F:l0:0 I:l0:0 W:l0:0 +:l0", [(0, 100), (4, 140), (9, 60), (10, 0)], 10),
        ("F:l0:0 F:l0:1 I:l0:0 B:l0:1 W:l0:0 +:l0", [(0, 100), (4, 200), (8, 240), (13, 200), (19, 60), (20, 0)], 20),
        ("F:l0:0,1 B:l0:0,1 +:l0", [(0, 200), (8, 280), (20, 0)], 20),
    ],
)
def test_memory_is_kept_until_the_backward(texts: str, moments: list[tuple[float, int]], seconds: float) -> None:
    """From each forward to its backward; what is recomputed during that, what the weight gradient needs until then."""
    graph = _modules(frozen=False, l=(0,))
    if "0,1" in texts:
        graph = attrs.evolve(graph, modules=(attrs.evolve(graph.modules[0], batch_factor=2),))
    plan = _plan(2 if "1" in texts else 1, ranks_0=texts)
    check(plan, graph)
    costs = Costs(stages={StageId("l", 0): KEEPING})
    result = simulate(plan, graph, costs)
    assert [(time, kept["l"]) for time, kept in result.timeline.memory[0]] == moments
    peak = max(kept for _, kept in moments)
    assert result.peak_bytes == {0: {"l": peak}}
    assert result.peak_total == {0: peak}
    assert result.seconds == seconds
    [found] = peak_activations(plan, graph, costs).values()
    assert found.bytes == peak
    assert found.modules == {"l": Peak(in_flight(plan)[StageId("l", 0)], peak)}


def test_memory_without_a_backward_is_kept_until_it_has_left() -> None:
    """A frozen encoder keeps what it made until its message has arrived, the last stage nothing once it is done."""
    graph = _modules(v=(0,), l=(1,))
    costs = _costs(graph, v=10, l=2)
    stages = {stage: attrs.evolve(cost, activations=8) for stage, cost in costs.stages.items()}
    result = simulate(_plan(2, **TWO), graph, attrs.evolve(costs, stages=stages, link=Link(latency=3)))
    assert list(result.timeline.memory[0]) == [(0, {"v": 8}), (10, {"v": 16}), (13, {"v": 8}), (23, {"v": 0})]
    assert list(result.timeline.memory[1]) == [(13, {"l": 8}), (15, {"l": 0}), (23, {"l": 8}), (25, {"l": 0})]
    assert peak_activations(_plan(2, **TWO), graph, attrs.evolve(costs, stages=stages))[0].modules == {"v": Peak(1, 8)}
    stages = {stage: attrs.evolve(cost, passing=3) for stage, cost in stages.items()}
    busy = simulate(_plan(2, **TWO), graph, attrs.evolve(costs, stages=stages, link=Link(latency=3)))
    assert list(busy.timeline.memory[0]) == [
        (0, {"v": 11}),
        (10, {"v": 19}),
        (13, {"v": 11}),
        (20, {"v": 8}),
        (23, {"v": 0}),
    ]
    assert peak_activations(_plan(2, **TWO), graph, attrs.evolve(costs, stages=stages))[0].modules == {"v": Peak(1, 11)}


def test_a_budget_of_bytes_is_held_against_the_lists() -> None:
    """A rank that keeps more is named with what its modules keep, and what to allow."""
    graph = _modules(frozen=False, l=(0,))
    plan = _plan(2, ranks_0="F:l0:0 F:l0:1 B:l0:0 B:l0:1 +:l0")
    costs = Costs(stages={StageId("l", 0): KEEPING})
    check(plan, graph, max_bytes={0: 240}, costs=costs)
    text = r"rank 0: expected at most 239 bytes of .* got 240: l up to 2 microbatches, 240 bytes.* Allow 240"
    with pytest.raises(PlanError, match=text):
        check(plan, graph, max_bytes={0: 239}, costs=costs)


def test_a_plan_that_halts_is_refused() -> None:
    """A list that waits for ever is named; the checker says for whom."""
    graph = _modules(v=(0,), l=(1,))
    broken = _plan(2, **{**TWO, "ranks_0": "F:v0:0 S:v0:0:v->l F:v0:1"})
    with pytest.raises(PlanError, match=r"rank 1, action 3 \(forward of l.0, microbatch 1\): expected .* got a halt"):
        simulate(broken, graph, _costs(graph, v=1, l=1))


def _drawn(data: st.DataObject, graph: ModuleGraph, *, latency: bool) -> Costs:
    """Draw costs in whole numbers and fractions."""
    number = st.integers(0, 4) | st.fractions(0, 3, max_denominator=5)
    seconds = st.builds(Seconds, number, number)
    size = st.integers(0, 9)
    stages = {
        stage: data.draw(
            st.builds(
                StageCost,
                forward=seconds,
                input_gradient=seconds,
                weight_gradient=seconds,
                recompute=seconds,
                reduce=number,
                reduce_tied=number,
                activations=st.integers(5, 9),
                recomputed=size,
                weight_inputs=st.integers(0, 5),
                passing=size,
            )
        )
        for stage in graph.stages
    }
    return Costs(
        stages=stages,
        message_bytes={edge.name: 1 for edge in graph.edges if data.draw(st.booleans())},
        link=_link(data.draw(number) if latency else 0),
        overlaps=data.draw(st.booleans()),
    ).trained(graph)


def _handed_on(graph: ModuleGraph) -> list[Edge]:
    """Return the edges whose rows were made in the step before."""
    prefetch = {name: module.prefetch for name, module in graph.by_name.items()}
    return [edge for edge in graph.edges if prefetch[edge.source.module] and not prefetch[edge.target.module]]


@some
@given(data=st.data())
def test_every_second_of_a_rank_is_accounted_for(data: st.DataObject, cases: Cases) -> None:
    """Work and idle time by cause add up to the step, exactly; bars follow one another, each with its wait before."""
    case = data.draw(cases)
    costs = _drawn(data, case.graph, latency=True)
    result = simulate(case.plan, case.graph, costs)
    modules = set(case.graph.by_name)
    for actor in case.plan.actors:
        bars: list[Bar] = [bar for bar in result.timeline.bars if bar.ranks == actor.ranks]
        assert [bar.action for bar in bars] == [it for it in actor.actions if it.kind not in ("send", "receive")]
        now: Any = 0
        for bar in bars:
            assert bar.start - bar.waited == now
            assert bool(bar.waited) == bool(bar.cause)
            now = bar.finish
        for rank in actor.ranks:
            idle = result.bubbles[rank]
            assert result.work[rank] + sum(idle.values()) == result.seconds
            assert idle.keys() <= {"warm-up", "drain", "transfer", "peers", *modules}
            assert all(seconds > 0 for seconds in idle.values())
    for row in rows_of(result.timeline):  # what the page shows is what the terminal prints
        for rank in row.ranks:
            assert (row.busy, row.idle) == (result.work[rank], result.bubbles[rank])
    assert isinstance(result.seconds, (int, Fraction))
    assert result.timeline.seconds == result.seconds


@some
@given(data=st.data())
def test_nothing_begins_before_what_it_needs(data: st.DataObject, cases: Cases) -> None:
    """Every computation starts no earlier than each that feeds it has ended, and its message has arrived."""
    case = data.draw(cases)
    costs = _drawn(data, case.graph, latency=True)
    result = simulate(case.plan, case.graph, costs)
    ends: dict[tuple[str, StageId, int], Any] = {}
    for bar in result.timeline.bars:
        if bar.action.kind in ("forward", "backward", "input-gradient"):
            what = "rows" if bar.action.kind == "forward" else "gradient"
            for microbatch in bar.action.microbatches:
                key = (what, bar.action.stage_id, microbatch)
                ends[key] = max(ends.get(key, 0), bar.finish)
    handed_on = _handed_on(case.graph)
    for bar in result.timeline.bars:
        action = bar.action
        for edge in case.graph.edges:
            for microbatch in action.microbatches:
                lag = costs.message(case.graph, edge)
                if edge.target == action.stage_id and action.kind == "forward":
                    made = 0 if edge in handed_on else ends["rows", edge.source, microbatch]
                    assert bar.start >= made + lag
                if edge.source == action.stage_id and edge.gradient and action.kind in ("backward", "input-gradient"):
                    assert bar.start >= ends["gradient", edge.target, microbatch] + lag


@some
@given(data=st.data())
def test_peaks_read_off_lists_are_those_of_the_simulation(data: st.DataObject, cases: Cases) -> None:
    """Where messages take no time, memory over time and the walk through each list agree; so do microbatches."""
    case = data.draw(cases)
    costs = _drawn(data, case.graph, latency=False)
    result = simulate(case.plan, case.graph, costs)
    peaks = peak_activations(case.plan, case.graph, costs)
    flights = in_flight(case.plan)
    for rank in case.graph.ranks:
        assert result.peak_total[rank] == peaks[rank].bytes
        assert result.peak_bytes[rank] == {name: peak.bytes for name, peak in peaks[rank].modules.items()}
        for name, peak in peaks[rank].modules.items():
            stages = [stage for stage in case.graph.role(rank).stages if stage.module == name]
            assert peak.microbatches <= sum(flights[stage] for stage in stages)
        left = dict.fromkeys(peaks[rank].modules, 0)
        for source in {edge.source for edge in _handed_on(case.graph)}:
            if rank in case.graph.stage_ranks(source):
                left[source.module] += case.plan.microbatches * costs.stages[source].activations
        assert [dict(kept) for _, kept in result.timeline.memory[rank][-1:]] == [left]
