"""What the checker and the emulator say of passes over several microbatches, split backwards, and chunks of a group."""

from __future__ import annotations

from typing import Any

import pytest

from mimo.hooks import PlanError
from mimo.schedule import Action, ActorPlan, Plan, check
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph

KINDS: dict[str, Any] = {
    "F": "forward",
    "B": "backward",
    "I": "input-gradient",
    "W": "weight-gradient",
    "S": "send",
    "R": "receive",
    "+": "reduce",
}


def _plan(microbatches: int, **lists: str) -> Plan:
    """Return a plan from lists keyed ``ranks_0_1``: ``F:v0:0,1`` is a forward, ``S:v0:0:v->l`` a send."""

    def action(text: str) -> Action:
        kind, stage, served, edge = (*text.split(":"), "", "")[:4]
        numbers = tuple(int(each) for each in served.split(",") if each)
        return Action(kind=KINDS[kind], module=stage[0], stage=int(stage[1:]), microbatches=numbers, edge=edge or None)

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


def _fed(batch_factor: int = 2) -> ModuleGraph:
    """Return ``v``, whose passes serve several microbatches, on rank 0, that feeds ``l`` on rank 1."""
    return ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(True,), batch_factor=batch_factor),
            Module(grid=Grid(name="l", ranks=(1,)), trains=(True,)),
        ),
        arrows=(("v", "l"),),
    )


FED = {
    "ranks_0": "F:v0:0,1 S:v0:0:v->l S:v0:1:v->l R:v0:0:v->l R:v0:1:v->l B:v0:0,1 +:v0",
    "ranks_1": "R:l0:0:v->l R:l0:1:v->l F:l0:0 B:l0:0 S:l0:0:v->l F:l0:1 B:l0:1 S:l0:1:v->l +:l0",
}


def test_a_pass_feeds_and_is_fed_message_by_message() -> None:
    """Both microbatches of a pass have messages of their own, either way."""
    plan = _plan(2, **FED)
    check(plan, _fed())
    assert emulate(plan, _fed()).in_flight == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("list_of", "old", "new", "text"),
    [
        ("ranks_0", "R:v0:1:v->l ", "", r"rank 0: expected receive on v->l by v.0, microbatch 1, once"),
        ("ranks_0", "R:v0:1:v->l B:v0:0,1", "B:v0:0,1 R:v0:1:v->l", r"after receive on v->l by v.0, microbatch 1, got"),
        ("ranks_0", "B:v0:0,1", "B:v0:0", r"expected a whole pass of v, microbatches 0, 1, got microbatch 0\.$"),
        ("ranks_0", "B:v0:0,1", "B:v0:1 B:v0:0", r"expected a whole pass of v, microbatches 0, 1, got microbatch 1"),
        ("ranks_0", "B:v0:0,1", "B:v0:1,0", r"a whole pass of v, microbatches 0, 1, got microbatches 1, 0\.$"),
        ("ranks_0", "B:v0:0,1", "I:v0:0,1 W:v0:0 W:v0:1", r"\(weight-gradient of v.0, microbatch 0\): expected a who"),
        ("ranks_0", "B:v0:0,1", "I:v0:0 I:v0:1 W:v0:0,1", r"\(input-gradient of v.0, microbatch 0\): expected a whol"),
        ("ranks_0", "F:v0:0,1", "F:v0:0 F:v0:1", r"\(forward of v.0, microbatch 0\): expected a whole pass of v, mic"),
        ("ranks_0", "B:v0:0,1", "", r"rank 0: expected backward of v.0, microbatch 0, once in the list, got none"),
        ("ranks_0", "B:v0:0,1", "B:v0:0,1,1", r"expected each microbatch once, from 0 to 1, got microbatches 0, 1, 1"),
        (
            "ranks_0",
            "B:v0:0,1",
            "B:v0:0,1 B:v0:0,1",
            r"\(backward of v.0, microbatches 0, 1\): expected it once in the list",
        ),
        ("ranks_0", "S:v0:0:v->l S:v0:1:v->l", "S:v0:0,1:v->l", r"expected the order of rank 0, .* microbatches 0, 1"),
        ("ranks_0", "S:v0:0:v->l S:v0:1:v->l", "S:v0:1:v->l S:v0:0:v->l", r"expected the order of rank 0, which here"),
    ],
)
def test_a_fault_in_a_pass_is_named(list_of: str, old: str, new: str, text: str) -> None:
    """A pass waits for all its messages, serves each microbatch once, and channels keep their order."""
    with pytest.raises(PlanError, match=text):
        check(_plan(2, **{**FED, list_of: FED[list_of].replace(old, new)}), _fed())


@pytest.mark.parametrize(
    ("new", "text"),
    [
        ("B:v0:0 B:v0:1", r"\(backward of v.0, microbatch 0\): expected forward of just these microbatches before it"),
        ("B:v0:1,0", r"\(backward of v.0, microbatches 1, 0\): expected forward of just these microbatches before it"),
        ("I:v0:0 I:v0:1 W:v0:0,1", r"\(input-gradient of v.0, microbatch 0\): expected forward of just these"),
        ("I:v0:0,1 W:v0:0 W:v0:1", r"\(weight-gradient of v.0, microbatch 0\): expected input-gradient of just these"),
    ],
)
def test_the_emulator_finds_what_a_pass_left_by_its_microbatches(new: str, text: str) -> None:
    """As a rank does: what is kept for one backward does not serve two, nor what two kept one."""
    lists = {**FED, "ranks_0": FED["ranks_0"].replace("B:v0:0,1", new)}
    with pytest.raises(PlanError, match=text):
        emulate(_plan(2, **lists), _fed())


def test_the_emulator_has_data_by_the_passes_of_the_module() -> None:
    """A forward of part of a pass, or of two together, would take samples that do not come so."""
    parts = {**FED, "ranks_0": FED["ranks_0"].replace("F:v0:0,1", "F:v0:0 F:v0:1").replace("B:v0:0,1", "B:v0:0 B:v0:1")}
    for lists, factor, got in ((parts, 2, "microbatch 0"), (FED, 1, "microbatches 0, 1")):
        with pytest.raises(PlanError, match=rf"expected microbatches that come as one pass of v, got {got}\.$"):
            emulate(_plan(2, **lists), _fed(batch_factor=factor))
    emulate(_plan(2, **parts), _fed(batch_factor=1))


def test_a_pass_that_waits_for_what_waits_for_it_is_refused() -> None:
    """The consumer's backward of the first microbatch must not wait for rows of a pass behind that backward."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(True,)),
            Module(grid=Grid(name="l", ranks=(1,)), trains=(True,), batch_factor=2),
        ),
        arrows=(("v", "l"),),
    )
    lists = {
        "ranks_0": "F:v0:0 S:v0:0:v->l R:v0:0:v->l B:v0:0 F:v0:1 S:v0:1:v->l R:v0:1:v->l B:v0:1 +:v0",
        "ranks_1": "R:l0:0:v->l R:l0:1:v->l F:l0:0,1 B:l0:0,1 S:l0:0:v->l S:l0:1:v->l +:l0",
    }
    text = r"rank 0 at action 2 \(receive on v->l by v.0, .* until rank 1 come to action 4 .*; rank 1 at action 1"
    with pytest.raises(PlanError, match=text):
        check(_plan(2, **lists), graph)
    with pytest.raises(PlanError, match=r"expected that every rank finishes"):
        emulate(_plan(2, **lists), graph)


def _tensor_ranks(*, recompute: Any = "none") -> ModuleGraph:
    """Return ``l`` over two tensor ranks, which have lists of their own as rank 1 has ``c`` too."""
    return ModuleGraph(
        modules=(
            Module(grid=Grid(name="c", ranks=(1,)), trains=(False,), batch_factor=2),
            Module(grid=Grid(name="l", ranks=(0, 1), tp=2), trains=(True,), recompute=recompute),
        ),
        arrows=(),
    )


def test_weight_gradients_meet_nobody() -> None:
    """They have no collectives inside, so tensor ranks may do them in different orders, at different times."""
    first = "F:l0:0 F:l0:1 I:l0:0 I:l0:1 W:l0:0 W:l0:1 +:l0"
    second = "F:l0:0 F:l0:1 I:l0:0 W:l0:0 I:l0:1 F:c0:0,1 W:l0:1 +:l0"
    crossed = "F:l0:0 F:l0:1 I:l0:0 I:l0:1 W:l0:1 F:c0:0,1 W:l0:0 +:l0"
    for other in (second, crossed):
        plan = _plan(2, ranks_0=first, ranks_1=other)
        check(plan, _tensor_ranks())
        for seed in range(5):
            emulate(plan, _tensor_ranks(), seed=seed)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_recomputed_meets_in_the_input_gradient(recompute: Any) -> None:
    """Collectives that backward repeats lie in its first part: tensor ranks must come to those in one order."""
    graph = _tensor_ranks(recompute=recompute)
    first = "F:l0:0 F:l0:1 I:l0:0 I:l0:1 W:l0:0 W:l0:1 +:l0"
    plan = _plan(2, ranks_0=first, ranks_1=first.replace("I:l0:0 I:l0:1", "I:l0:1 I:l0:0") + " F:c0:0,1")
    with pytest.raises(
        PlanError, match=r"\(input-gradient of l.0, microbatch 1\): expected the order of rank 0, which"
    ):
        check(plan, graph)
    with pytest.raises(PlanError, match=r"expected one collective of all, got input-gradient of l.0, microbatch"):
        emulate(plan, graph)


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        ("F:l0:0 F:l0:1 I:l0:0 W:l0:0 B:l0:1 +:l0", None),
        ("F:l0:0 F:l0:1 I:l0:0 W:l0:0 W:l0:1 I:l0:1 +:l0", r"after input-gradient of l.0, microbatch 1, got .* 5"),
        (
            "F:l0:0 F:l0:1 B:l0:0 I:l0:1 +:l0 W:l0:1",
            r"\(reduce of l.0\): expected it after weight-gradient of l.0, mic",
        ),
        (
            "F:l0:0 F:l0:1 B:l0:0 I:l0:1 +:l0",
            r"expected weight-gradient of l.0, microbatch 1, once in the list, got no",
        ),
        ("F:l0:0 F:l0:1 B:l0:0 W:l0:1 +:l0", r"expected input-gradient of l.0, microbatch 1, once in the list, got no"),
        (
            "F:l0:0 F:l0:1 B:l0:0 B:l0:1 W:l0:1 +:l0",
            r"\(backward of l.0, microbatch 1\): expected a backward either wh",
        ),
        ("F:l0:0 I:l0:1 F:l0:1 W:l0:1 B:l0:0 +:l0", r"after forward of l.0, microbatch 1, got that at action 2"),
    ],
)
def test_backwards_are_whole_or_in_two_parts(texts: str, text: str | None) -> None:
    """Each microbatch by itself; the parts in their order, and both before the reduction."""
    graph = ModuleGraph(modules=(Module(grid=Grid(name="l", ranks=(0,)), trains=(True,)),), arrows=())
    plan = _plan(2, ranks_0=texts)
    if text is None:
        check(plan, graph)
        emulate(plan, graph)
        return
    with pytest.raises(PlanError, match=text):
        check(plan, graph)
    with pytest.raises(PlanError):
        emulate(plan, graph)


def test_a_pass_may_go_back_in_two_parts() -> None:
    """Over several microbatches, too, with others whole; the last pass is of what is left."""
    graph = ModuleGraph(modules=(Module(grid=Grid(name="l", ranks=(0,)), trains=(True,), batch_factor=2),), arrows=())
    plan = _plan(3, ranks_0="F:l0:0,1 F:l0:2 I:l0:0,1 B:l0:2 W:l0:0,1 +:l0")
    check(plan, graph)
    emulate(plan, graph)


def test_chunks_of_a_group_share_its_order() -> None:
    """Tensor ranks that come to different chunks at a time mix them up: the group is the same."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="c", ranks=(1,)), trains=(False,), batch_factor=2),
            Module(grid=Grid(name="l", ranks=(0, 1), tp=2), trains=(False, False), chunks=2),
        ),
        arrows=(),
    )
    first, second = (f"F:l0:{number} R:l1:{number}:l.0-1 S:l0:{number}:l.0-1" for number in (0, 1))
    deep, broad = f"{first} F:l1:0 {second} F:l1:1", f"{first} {second} F:l1:0 F:l1:1"
    check(_plan(2, ranks_0=deep, ranks_1=f"{deep} F:c0:0,1"), graph)
    mixed = _plan(2, ranks_0=deep, ranks_1=f"{broad} F:c0:0,1")
    with pytest.raises(PlanError, match=r"rank 0 at action 3 \(forward of l.1, microbatch 0\) until rank 1 come to"):
        check(mixed, graph)
    with pytest.raises(PlanError, match=r"expected one collective of all, got forward of l.[01], microbatch"):
        emulate(mixed, graph, peers=lambda edge, _: [(rank, rank) for rank in graph.stage_ranks(edge.source)])
