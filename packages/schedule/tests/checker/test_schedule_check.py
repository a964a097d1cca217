"""What the checker says of each fault: its text names the actor, the action and the cause."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from mimo.hooks import PlanError
from mimo.schedule import Action, ActorPlan, Costs, Plan, check, in_flight
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId

Actions = list[Action]


def _action(text: str) -> Action:
    """Return the action that ``kind module.stage [microbatch] [edge]`` says, with ``-`` for no microbatch."""
    kind, stage, *rest = text.split()
    module, _, number = stage.partition(".")
    microbatches = tuple(int(part) for part in rest[0].split(",")) if rest and rest[0] != "-" else ()
    return Action(
        kind=kind,  # type: ignore[arg-type]  # the tests write kinds that do not exist, too
        module=module,
        stage=int(number),
        microbatches=microbatches,
        edge=rest[1] if len(rest) > 1 else None,
    )


def _plan(microbatches: int, **lists: list[str]) -> Plan:
    """Return a plan from lists of actions, keyed ``ranks_0_1``."""
    return Plan(
        schedule="by hand",
        microbatches=microbatches,
        actors=tuple(
            ActorPlan(
                ranks=tuple(int(rank) for rank in name.split("_")[1:]), actions=tuple(_action(text) for text in texts)
            )
            for name, texts in lists.items()
        ),
    )


def _two_modules(*, frozen: bool = False) -> ModuleGraph:
    """Return ``v`` on ranks 0-1, feeding ``l`` on ranks 2-3."""
    return ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0, 1), dp=2), trains=(not frozen,)),
            Module(grid=Grid(name="l", ranks=(2, 3), tp=2), trains=(True,)),
        ),
        arrows=(("v", "l"),),
    )


def _edit(number: int, edit: Callable[[Actions], object]) -> Plan:
    """Return the 1F1B plan of two microbatches over two modules with the list of one actor edited."""
    plan = generate(_two_modules(), 2, OneForwardOneBackward(), Costs.even(_two_modules()))
    actions = list(plan.actors[number].actions)
    edit(actions)
    actors = list(plan.actors)
    actors[number] = attrs.evolve(actors[number], actions=tuple(actions))
    return attrs.evolve(plan, actors=tuple(actors))


def _remove(text: str) -> Callable[[Actions], object]:
    return lambda actions: actions.remove(_action(text))


def _append(text: str) -> Callable[[Actions], object]:
    return lambda actions: actions.append(_action(text))


def _swap(first: str, second: str) -> Callable[[Actions], object]:
    def edit(actions: Actions) -> None:
        low, high = actions.index(_action(first)), actions.index(_action(second))
        actions[low], actions[high] = actions[high], actions[low]

    return edit


def _bring(later: str, before: str) -> Callable[[Actions], object]:
    def edit(actions: Actions) -> None:
        action = actions.pop(actions.index(_action(later)))
        actions.insert(actions.index(_action(before)), action)

    return edit


def _replace(text: str, *others: str) -> Callable[[Actions], object]:
    def edit(actions: Actions) -> None:
        index = actions.index(_action(text))
        actions[index : index + 1] = [_action(other) for other in others]

    return edit


@pytest.mark.parametrize(
    ("number", "edit", "text"),
    [
        (1, _remove("forward l.0 1"), r"plan, ranks 2-3: expected forward of l.0, microbatch 1, once .*, got none"),
        (0, _remove("backward v.0 0"), r"plan, ranks 0-1: expected backward of v.0, microbatch 0, once .*, got none"),
        (1, _remove("receive l.0 0 v->l"), r"ranks 2-3: expected receive on v->l by l.0, microbatch 0, .* got none"),
        (0, _remove("send v.0 1 v->l"), r"ranks 0-1: expected send on v->l by v.0, microbatch 1, .* got none"),
        (0, _remove("reduce v.0"), r"plan, ranks 0-1: expected reduce of v.0, once in the list, got none"),
        (
            0,
            _append("forward v.0 1"),
            r"action 9 \(forward of v.0, microbatch 1\): expected it once .* got two: 2 too",
        ),
        (0, _append("forward l.0 1"), r"\(forward of l.0, .*\): expected a stage that these ranks hold, got l.0; they"),
        (0, _append("forward v.0 2"), r"expected each microbatch once, from 0 to 1, got microbatch 2"),
        (0, _append("forward v.0 -"), r"action 9 \(forward of v.0\): expected microbatches from 0 to 1, got none"),
        (0, _append("reduce v.0 1"), r"expected a reduction without microbatches, got microbatch 1"),
        (0, _append("reduce v.0 - v.tied"), r"something that v.0 has to do, got nothing tied called 'v.tied'"),
        (0, _append("send v.0 1 v->x"), r"got an edge 'v->x' that the graph does not have"),
        (0, _append("forward v.0 1 v->l"), r"got an edge on a computation"),
        (0, _append("rest v.0 1"), r"expected a kind of forward, backward, .*, got 'rest'"),
        (
            0,
            _swap("forward v.0 0", "send v.0 0 v->l"),
            r"action 0 \(send on v->l by v.0, microbatch 0\): expected it after forward of v.0, microbatch 0, got that",
        ),
        (
            1,
            _swap("forward l.0 0", "receive l.0 0 v->l"),
            r"expected it after receive on v->l by l.0, microbatch 0, got that at action 2",
        ),
        (
            0,
            _swap("backward v.0 1", "reduce v.0"),
            r"\(reduce of v.0\): expected it after backward of v.0, microbatch 1",
        ),
        (
            0,
            _bring("receive v.0 1 v->l", "receive v.0 0 v->l"),
            r"v->l by l.0, microbatch 0\): expected the order of ranks 0-1, which here list receive on v->l by v.0, ",
        ),
        (
            0,
            _replace("backward v.0 0", "backward v.0 0", "input-gradient v.0 0", "weight-gradient v.0 0"),
            r"\(backward of v.0, microbatch 0\): expected a backward either whole or in two parts",
        ),
        (0, _replace("backward v.0 0", "input-gradient v.0 0"), r"expected weight-gradient of v.0, microbatch 0, once"),
        (
            0,
            _replace("backward v.0 0", "weight-gradient v.0 0", "input-gradient v.0 0"),
            r"\(weight-gradient of v.0, microbatch 0\): expected it after input-gradient of v.0, microbatch 0",
        ),
    ],
)
def test_a_fault_is_named(number: int, edit: Callable[[Actions], object], text: str) -> None:
    """Whatever is left out, done twice, misplaced or unknown is refused by name."""
    with pytest.raises(PlanError, match=text):
        check(_edit(number, edit), _two_modules())


def test_a_split_backward_is_accepted() -> None:
    """Input and weight gradients do for a backward, the weight's any time later, and the gradient may leave between."""
    plan = _edit(1, _replace("backward l.0 0", "input-gradient l.0 0"))
    actions = list(plan.actors[1].actions)
    actions.insert(len(actions) - 1, _action("weight-gradient l.0 0"))
    plan = attrs.evolve(plan, actors=(plan.actors[0], attrs.evolve(plan.actors[1], actions=tuple(actions))))
    check(plan, _two_modules())
    emulate(plan, _two_modules())
    assert in_flight(plan)[StageId("l", 0)] == 2


def _bundled(kind: str, module: str, *served: tuple[int, ...]) -> Plan:
    """Return the plan of two modules in which the actions of a kind serve these, wherever the first of them stood."""
    number, texts = "vl".index(module), [f"{kind} {module}.0 {','.join(map(str, each))}" for each in served]

    def edit(actions: Actions) -> None:
        places = [at for at, action in enumerate(actions) if (action.kind, action.module) == (kind, module)]
        for place in places[:0:-1]:
            del actions[place]
        actions[places[0] : places[0] + 1] = [_action(text) for text in texts]

    return _edit(number, edit)


@pytest.mark.parametrize(("kind", "module"), [("forward", "v"), ("forward", "l"), ("backward", "v"), ("backward", "l")])
def test_microbatches_of_other_passes_together_are_refused(kind: str, module: str) -> None:
    """A pass serves as many as the module's ``batch_factor`` says: so its data come, and its activations are kept."""
    plan = _bundled(kind, module, (0, 1))
    with pytest.raises(
        PlanError,
        match=rf"\({kind} of {module}.0, microbatches 0, 1\): expected a whole pass of {module}, microbatch 0, "
        r"got microbatches 0, 1\.$",
    ):
        check(plan, _two_modules())
    with pytest.raises(PlanError):
        emulate(plan, _two_modules())


def test_work_for_a_frozen_module_is_refused() -> None:
    """A plan made before a module was frozen has gradients that nobody needs."""
    plan = generate(_two_modules(), 1, OneForwardOneBackward(), Costs.even(_two_modules()))
    with pytest.raises(PlanError, match=r"ranks 0-1, .*: expected something that v.0 has to do, got a gradient on an"):
        check(plan, _two_modules(frozen=True))


def test_lists_for_other_ranks_are_refused() -> None:
    """A plan of another layout, or with a list twice, does not fit."""
    plan = generate(_two_modules(), 1, OneForwardOneBackward(), Costs.even(_two_modules()))
    other = attrs.evolve(plan, actors=(attrs.evolve(plan.actors[0], ranks=(0, 1, 4)), plan.actors[1]))
    with pytest.raises(PlanError, match=r"plan, ranks 0-1: expected 1 lists of actions, one for all ranks .*, got 0"):
        check(other, _two_modules())
    with pytest.raises(PlanError, match=r"plan, ranks 2-3: expected 1 lists of actions, .* got 2"):
        check(attrs.evolve(plan, actors=(*plan.actors, plan.actors[1])), _two_modules())


def test_sends_that_wait_for_each_other_are_refused() -> None:
    """Naive 1F1B: both stages send before they post what the other sends; with unbuffered sends neither moves again."""
    graph = ModuleGraph(modules=(Module(grid=Grid(name="l", ranks=(0, 1), pp=2), trains=(True, True)),), arrows=())
    plan = _plan(
        2,
        ranks_0=[
            "forward l.0 0",
            "send l.0 0 l.0-1",
            "forward l.0 1",
            "send l.0 1 l.0-1",
            "receive l.0 0 l.0-1",
            "backward l.0 0",
            "receive l.0 1 l.0-1",
            "backward l.0 1",
            "reduce l.0",
        ],
        ranks_1=[
            "receive l.1 0 l.0-1",
            "forward l.1 0",
            "backward l.1 0",
            "send l.1 0 l.0-1",
            "receive l.1 1 l.0-1",
            "forward l.1 1",
            "backward l.1 1",
            "send l.1 1 l.0-1",
            "reduce l.1",
        ],
    )
    text = (
        r"expected no circle of waiting, got rank 0 at action 3 \(send on l.0-1 by l.0, microbatch 1\) until rank 1 "
        r"come to action 4 \(receive on l.0-1 by l.1, microbatch 1\); rank 1 at action 3 \(send on l.0-1 by l.1, "
        r"microbatch 0\) until rank 0 come to action 4 \(receive on l.0-1 by l.0, microbatch 0\)"
    )
    with pytest.raises(PlanError, match=text):
        check(plan, graph)
    with pytest.raises(PlanError, match=r"rank 0 at action 3 .* waits for rank 1; rank 1 at action 3 .* for rank 0"):
        emulate(plan, graph)


@pytest.mark.parametrize(
    ("axis", "kind"),
    [(axis, kind) for axis in ("tp", "cp", "ep", "etp") for kind in ("forward", "backward", "reduce")]
    + [("dp", "reduce")],
)
def test_collectives_that_wait_for_each_other_are_refused(axis: str, kind: str) -> None:
    """Two ranks share the groups of two modules and enter them in opposite orders."""
    experts = axis in {"ep", "etp"}
    sizes = {axis: 2, "dp": 2} if experts else {axis: 2}
    grids = [Grid(name=name, ranks=(0, 1), **sizes) for name in "ab"] + [Grid(name="c", ranks=(1,))]
    graph = ModuleGraph(modules=tuple(Module(grid=grid, trains=(True,), experts=experts) for grid in grids), arrows=())
    own = ["forward c.0 0", "backward c.0 0", "reduce c.0"]
    straight = ["forward a.0 0", "forward b.0 0", "backward a.0 0", "backward b.0 0", "reduce a.0", "reduce b.0"]
    check(_plan(1, ranks_0=straight, ranks_1=[*straight, *own]), graph)
    index = next(index for index, text in enumerate(straight) if text.startswith(kind))
    crossed = [*straight[:index], straight[index + 1], straight[index], *straight[index + 2 :], *own]
    broken = _plan(1, ranks_0=straight, ranks_1=crossed)
    text = (
        rf"expected no circle of waiting, got rank 0 at action {index} \({kind} of a.0.*\) until rank 1 come to action "
        rf"{index + 1} \({kind} of a.0.*\); rank 1 at action {index} \({kind} of b.0.*\) until rank 0 come to action "
        rf"{index + 1} \({kind} of b.0.*\)"
    )
    with pytest.raises(PlanError, match=text):
        check(broken, graph)
    with pytest.raises(
        PlanError, match=r"expected that every rank finishes, got rank 0 at .* waits for rank 1; rank 1"
    ):
        emulate(broken, graph)


def test_an_actor_at_both_ends_receives_and_sends_in_one_batch() -> None:
    """On a communicator that serialises, a receive that stands alone would hold up the send behind it for ever."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0,)), trains=(False,)),
            Module(grid=Grid(name="l", ranks=(0,)), trains=(False,)),
        ),
        arrows=(("v", "l"),),
    )
    check(_plan(1, ranks_0=["forward v.0 0", "receive l.0 0 v->l", "send v.0 0 v->l", "forward l.0 0"]), graph)
    batch = (
        r"\(receive on v->l by l.0, microbatch 0\): expected send on v->l by v.0, microbatch 0 next: a rank at both "
        r"ends of an edge sends and receives in one batch, got {}\. List the receive right before the send, behind"
    )
    early = ["receive l.0 0 v->l", "forward v.0 0", "send v.0 0 v->l", "forward l.0 0"]
    with pytest.raises(PlanError, match=batch.format("forward of v.0, microbatch 0")):
        check(_plan(1, ranks_0=early), graph)
    late = ["forward v.0 0", "send v.0 0 v->l", "receive l.0 0 v->l", "forward l.0 0"]
    with pytest.raises(PlanError, match=batch.format("forward of l.0, microbatch 0")):
        check(_plan(1, ranks_0=late), graph)
    never = ["forward v.0 0", "receive l.0 0 v->l", "forward l.0 0", "send v.0 0 v->l"]
    for texts in (early, late, never):
        with pytest.raises(PlanError, match=r"plan, rank 0: expected that every rank finishes, got rank 0 at"):
            emulate(_plan(1, ranks_0=texts), graph)


def test_too_many_microbatches_in_flight_are_refused() -> None:
    """A bound on a stage is held against the list of its actors."""
    plan = generate(_two_modules(), 8, OneForwardOneBackward(), Costs.even(_two_modules()))
    check(plan, _two_modules(), max_in_flight={StageId("v", 0): 2})
    with pytest.raises(PlanError, match=r"plan, ranks 0-1, forward of v.0: expected at most 1 microbatches .*, got 2"):
        check(plan, _two_modules(), max_in_flight={StageId("v", 0): 1})


def test_a_tied_parameter_reduced_too_late_is_refused() -> None:
    """A stage's own reduction would miss what the other copy adds."""
    grid = Grid(name="l", ranks=(0, 1), pp=2)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True, True), tied=True),), arrows=())
    plan = generate(graph, 1, OneForwardOneBackward(), Costs.even(graph))
    late = attrs.evolve(plan.actors[0], actions=(*plan.actors[0].actions[:-2], *plan.actors[0].actions[:-3:-1]))
    with pytest.raises(
        PlanError, match=r"rank 0, .* \(reduce of l.0\): expected it after reduce on l.tied by l.0, got"
    ):
        check(attrs.evolve(plan, actors=(late, plan.actors[1])), graph)


@pytest.mark.parametrize("gathers", [False, True])
def test_weight_gradients_that_lanes_complete_together_have_one_order(*, gathers: bool) -> None:
    """Where lanes share gradients after each backward, they meet in the deferred part; else they need not."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0, 1), dp=2), trains=(True,), gathers=gathers),
            Module(grid=Grid(name="l", ranks=(1,)), trains=(True,)),
        ),
        arrows=(),
    )

    def steps(module: str, *later: int) -> list[str]:
        both = [f"{kind} {module}.0 {number}" for kind in ("forward", "input-gradient") for number in (0, 1)]
        return [*both, *(f"weight-gradient {module}.0 {number}" for number in later), f"reduce {module}.0"]

    plan = _plan(2, ranks_0=steps("v", 0, 1), ranks_1=[*steps("v", 1, 0), *steps("l", 0, 1)])
    if not gathers:
        check(plan, graph)
        emulate(plan, graph)
        return
    with pytest.raises(PlanError, match=r"expected the order of rank 0, which here list weight-gradient of v.0"):
        check(plan, graph)
    same = _plan(2, ranks_0=steps("v", 1, 0), ranks_1=[*steps("v", 1, 0), *steps("l", 0, 1)])
    check(same, graph)
    emulate(same, graph)


@pytest.mark.parametrize(
    ("texts", "peak"),
    [
        (
            [
                "forward l.0 0",
                "backward l.0 0",
                "forward l.0 1",
                "send l.0 0 v->l",
                "backward l.0 1",
                "send l.0 1 v->l",
            ],
            1,
        ),
        (["forward l.0 0", "forward l.0 1", "backward l.0 0", "backward l.0 1"], 2),
        (["forward l.0 0", "input-gradient l.0 0", "forward l.0 1", "weight-gradient l.0 0"], 2),
        (["forward l.0 0", "input-gradient l.0 0", "weight-gradient l.0 0", "forward l.0 1", "send l.0 0 v->l"], 1),
        (["forward l.0 0", "send l.0 0 l->d", "forward l.0 1", "send l.0 1 l->d"], 1),
        (["forward l.0 0", "send l.0 0 l->d", "forward l.0 1", "send l.0 0 l->e"], 2),
        (["receive l.0 0 v->l", "receive l.0 1 v->l", "forward l.0 0", "forward l.0 1"], 1),
        (["forward l.0 0,1", "backward l.0 0", "backward l.0 1"], 2),
    ],
)
def test_microbatches_in_flight_are_counted(texts: list[str], peak: int) -> None:
    """From the forward to the backward or weight gradient; without either, until the rows were sent."""
    assert in_flight(_plan(2, ranks_0=texts)) == {StageId("l", 0): peak}
