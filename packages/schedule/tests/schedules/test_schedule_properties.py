"""Laws of plans over random graphs: what the generator makes is proved and finishes; what is broken is refused.

The checker and the emulator share no code, so each is a test of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mimo.hooks import ConfigError, PlanError
from mimo.schedule import Action, ActorPlan, Costs, Plan, check, in_flight
from mimo.schedule.schedules import gpipe, interleaved, zero_bubble
from mimo.schedule.schedules.demands import trains
from mimo.schedule.schedules.named import MakeOrder, rules_of, unordered
from mimo.schedule.testing import Peers, emulate
from mimo.topology import Edge, Module, ModuleGraph, StageId

BACKWARDS = ("backward", "input-gradient", "weight-gradient")
Routes = Callable[[ModuleGraph, int], Peers]
Cases = st.SearchStrategy[Any]
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def _with(plan: Plan, number: int, actions: Sequence[Action]) -> Plan:
    """Return the plan with other actions for one actor."""
    actors = list(plan.actors)
    actors[number] = attrs.evolve(actors[number], actions=tuple(actions))
    return attrs.evolve(plan, actors=tuple(actors))


def _places(plan: Plan, *kinds: str) -> list[tuple[int, int]]:
    """Return (actor, index) of every action of these kinds, of all where none is named."""
    return [
        (number, index)
        for number, actor in enumerate(plan.actors)
        for index, action in enumerate(actor.actions)
        if not kinds or action.kind in kinds
    ]


def _pick(data: st.DataObject, choices: Sequence[Any]) -> Any:
    assume(choices)
    return data.draw(st.sampled_from(choices))


def _swapped(actor: ActorPlan, low: int, high: int) -> list[Action]:
    actions = list(actor.actions)
    actions[low], actions[high] = actions[high], actions[low]
    return actions


@many
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_a_generated_plan_is_proved_and_finishes(data: st.DataObject, seed: int, cases: Cases, routes: Routes) -> None:
    """The checker accepts it, whatever the schedule; ranks finish in any order, with any routes."""
    case = data.draw(cases)
    check(case.plan, case.graph)
    for peers in (None, routes(case.graph, seed)):
        result = emulate(case.plan, case.graph, seed=seed, peers=peers)
        assert result.actions == sum(len(actor.ranks) * len(actor.actions) for actor in case.plan.actors)


def assert_refused(broken: Plan, graph: ModuleGraph, *, checked: str, emulated: str | None = None) -> None:
    """Hold that the checker refuses a plan with a text that matches, and the emulator on its own."""
    with pytest.raises(PlanError, match=checked):
        check(broken, graph)
    with pytest.raises(PlanError, match=emulated):
        emulate(broken, graph)


def handed_on(modules: Mapping[str, Module], edge: Edge) -> bool:
    """Return whether an edge moves what the step before made."""
    return modules[edge.source.module].prefetch and not modules[edge.target.module].prefetch


ORDERS: Mapping[str, MakeOrder] = {
    "1f1b": unordered,
    "gpipe": gpipe._order,
    "interleaved": interleaved._order,
    **{f"zero-bubble {form}": order for form, order in zero_bubble._ORDERS.items()},
}
"""By schedule, the orders of its pipelines."""


def _bounds(graph: ModuleGraph, microbatches: int, schedule: str) -> Mapping[StageId, int]:
    """Return by how many microbatches each stage runs ahead of its gradients."""
    return rules_of(graph, microbatches, ORDERS[schedule] if trains(graph) else unordered).bounds


@few
@given(data=st.data())
def test_memory_of_a_1f1b_plan_is_bounded(data: st.DataObject, cases_of: Callable[[str], Cases]) -> None:
    """No stage has more microbatches in flight than there are stages from it to the loss, or two steps' made ahead."""
    case = data.draw(cases_of("1f1b"))
    modules, bounds = case.graph.by_name, _bounds(case.graph, case.plan.microbatches, "1f1b")
    ahead = {edge.source for edge in case.graph.edges if handed_on(modules, edge)}
    twice = dict.fromkeys(ahead, 2 * case.plan.microbatches)  # this step's, and the next one's
    check(case.plan, case.graph, max_in_flight={**bounds, **twice})
    result = emulate(case.plan, case.graph)
    for rank in case.graph.ranks:
        assert result.in_flight[rank] <= sum(in_flight(case.plan)[stage] for stage in case.graph.role(rank).stages)


@pytest.mark.parametrize("schedule", ORDERS)
@settings(few, max_examples=15)
@given(data=st.data())
def test_receives_that_wait_to_be_used_are_bounded(
    data: st.DataObject, schedule: str, cases_of: Callable[[str], Cases]
) -> None:
    """An edge never has more receives posted than its source runs microbatches ahead, and one for arriving early."""
    case = data.draw(cases_of(schedule))
    modules, bounds = case.graph.by_name, _bounds(case.graph, case.plan.microbatches, schedule)
    result = emulate(case.plan, case.graph)
    for rank in case.graph.ranks:
        stages = case.graph.role(rank).stages
        into = [edge for edge in case.graph.edges if edge.target in stages]
        back = [edge for edge in case.graph.edges if edge.source in stages and edge.gradient]
        assert result.receive_buffers[rank] <= sum(
            3 * modules[edge.target.module].batch_factor if handed_on(modules, edge) else bounds[edge.source] + 1
            for edge in (*into, *back)
        )


@pytest.mark.parametrize("schedule", sorted(ORDERS.keys() - {"gpipe"}))
@settings(few, max_examples=5)
@given(data=st.data())
def test_how_far_a_stage_runs_ahead_follows_from_the_modules_alone(
    data: st.DataObject, schedule: str, cases_of: Callable[[str], Cases]
) -> None:
    """However many microbatches a step has, twice as many make no stage run further ahead."""
    graph = data.draw(cases_of(schedule)).graph
    many, more = (_bounds(graph, microbatches, schedule) for microbatches in (1680, 3360))  # of whole passes and turns
    assert many == more


@few
@given(data=st.data())
def test_a_receive_stands_before_the_send_of_its_message(data: st.DataObject, cases: Cases) -> None:
    """An actor that is both ends of a message posts it before it sends it."""
    case = data.draw(cases)
    ends = {edge.name: (edge.source, edge.target) for edge in case.graph.edges}
    for actor in case.plan.actors:
        for index, action in enumerate(actor.actions):
            if action.kind == "send":
                other = next(end for end in ends[action.edge] if end != action.stage_id)
                receive = attrs.evolve(action, kind="receive", module=other.module, stage=other.stage)
                assert receive not in actor.actions[index:]


@few
@given(data=st.data())
def test_a_plan_survives_json(data: st.DataObject, cases: Cases) -> None:
    """A plan read from its JSON text is the plan that was written."""
    plan = data.draw(cases).plan
    assert Plan.from_json(plan.to_json()) == plan


@few
@given(data=st.data())
def test_without_training_there_are_forwards_alone(data: st.DataObject, cases: Cases) -> None:
    """Evaluation computes every forward, and neither backwards nor reductions, with any number of microbatches."""
    case = data.draw(cases)
    graph = case.graph.without_training()
    plan = case.schedule.generate(graph, 3, case.config, Costs.even(graph))
    check(plan, graph)
    emulate(plan, graph)
    assert {action.kind for actor in plan.actors for action in actor.actions} <= {"forward", "send", "receive"}


@few
@given(data=st.data())
def test_a_dropped_receive_is_refused(data: st.DataObject, cases: Cases) -> None:
    """A message that somebody sends and nobody receives is found."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan, "receive"))
    actions = case.plan.actors[number].actions
    broken = _with(case.plan, number, actions[:index] + actions[index + 1 :])
    with pytest.raises(PlanError, match=r"expected receive on .*, once in the list, got none"):
        check(broken, case.graph)


@few
@given(data=st.data())
def test_two_swapped_sends_are_refused(data: st.DataObject, cases: Cases) -> None:
    """Sends of two microbatches on one channel in the wrong order are found: they differ in nothing but their order."""
    case = data.draw(cases)
    number, low = _pick(data, _places(case.plan, "send"))
    actor = case.plan.actors[number]
    first = actor.actions[low]
    high = _pick(
        data,
        [
            index
            for index, action in enumerate(actor.actions)
            if action != first and attrs.evolve(action, microbatches=first.microbatches) == first
        ],
    )
    broken = _with(case.plan, number, _swapped(actor, low, high))
    assert_refused(broken, case.graph, checked=r"expected (it after|the order of)")


@few
@given(data=st.data())
def test_a_missing_backward_is_refused(data: st.DataObject, cases: Cases) -> None:
    """A stage that trains on all microbatches but one is found."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan, *BACKWARDS))
    actions = case.plan.actors[number].actions
    broken = _with(case.plan, number, actions[:index] + actions[index + 1 :])
    assert_refused(broken, case.graph, checked=r"expected \S+ of .*, once in the list, got none")


@few
@given(data=st.data())
def test_an_action_on_the_wrong_rank_is_refused(data: st.DataObject, cases: Cases) -> None:
    """An action listed where its stage is not held is found."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan))
    action = case.plan.actors[number].actions[index]
    elsewhere = [other for other, actor in enumerate(case.graph.actors) if action.stage_id not in actor.stages]
    wrong = _pick(data, elsewhere)
    actions = list(case.plan.actors[wrong].actions)
    actions.insert(data.draw(st.integers(0, len(actions))), action)
    broken = _with(case.plan, wrong, actions)
    assert_refused(
        broken,
        case.graph,
        checked=r"expected a stage that these ranks hold",
        emulated=r"expected a stage and edge of this rank",
    )


@few
@given(data=st.data(), double=st.booleans())
def test_any_action_too_few_or_too_many_is_refused(data: st.DataObject, double: bool, cases: Cases) -> None:
    """A plan holds nothing that could be left out or done twice."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan))
    actions = case.plan.actors[number].actions
    again = data.draw(st.integers(index, len(actions)))
    broken = (*actions[:again], actions[index], *actions[again:]) if double else actions[:index] + actions[index + 1 :]
    with pytest.raises(PlanError, match=r"got two: \d+ too" if double else r"once in the list, got none"):
        check(_with(case.plan, number, broken), case.graph)


@many
@given(data=st.data())
def test_other_microbatches_of_an_action_are_refused(data: st.DataObject, cases: Cases) -> None:
    """With one more, one less, others, or in another order, whatever the action and wherever the others went."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan, "forward", *BACKWARDS, "send", "receive"))
    actions = list(case.plan.actors[number].actions)
    served = actions[index].microbatches
    other = tuple(data.draw(st.lists(st.integers(-1, 2 * case.plan.microbatches), max_size=len(served) + 1)))
    assume(other != served)
    actions[index] = attrs.evolve(actions[index], microbatches=other)
    with pytest.raises(PlanError):
        check(_with(case.plan, number, actions), case.graph)


@many
@given(data=st.data())
def test_passes_that_are_cut_or_joined_are_refused(data: st.DataObject, cases: Cases) -> None:
    """Though each microbatch is served once, in order: neither data nor what is kept lie so."""
    case = data.draw(cases)
    number, index = _pick(data, _places(case.plan, "forward", *BACKWARDS))
    actions = list(case.plan.actors[number].actions)
    chosen = actions[index]
    equal = [
        at
        for at, action in enumerate(actions)
        if at > index and (action.kind, action.stage_id) == (chosen.kind, chosen.stage_id)
    ]
    if len(chosen.microbatches) > 1 and data.draw(st.booleans()):
        cut = data.draw(st.integers(1, len(chosen.microbatches) - 1))
        parts = (chosen.microbatches[:cut], chosen.microbatches[cut:])
        actions[index : index + 1] = [attrs.evolve(chosen, microbatches=part) for part in parts]
    else:
        assume(equal)
        joined = actions.pop(equal[0])
        actions[index] = attrs.evolve(chosen, microbatches=chosen.microbatches + joined.microbatches)
    assert_refused(_with(case.plan, number, actions), case.graph, checked=r"expected a whole pass of ")


def _shared_groups(graph: ModuleGraph) -> list[tuple[StageId, int]]:
    """Return the stages with a tensor or context group that ranks of several actors form, with one of these actors."""
    found = []
    for stage in graph.stages:
        grid = graph.by_name[stage.module].grid
        for number, actor in enumerate(graph.actors):
            if stage in actor.stages and not set(grid.group_of(actor.ranks[0], ("cp", "tp"))) <= set(actor.ranks):
                found.append((stage, number))
    return found


@few
@given(data=st.data())
def test_collectives_in_different_orders_are_refused(data: st.DataObject, cases: Cases) -> None:
    """Ranks of one tensor group that compute two things in different orders are found."""
    case = data.draw(cases)
    stage, number = _pick(data, _shared_groups(case.graph))
    actor = case.plan.actors[number]
    kinds = ("forward", "backward", "input-gradient")
    own = [index for index, action in enumerate(actor.actions) if action.stage_id == stage and action.kind in kinds]
    assume(len(own) > 1)
    low, high = sorted(data.draw(st.lists(st.sampled_from(own), min_size=2, max_size=2, unique=True)))
    broken = _with(case.plan, number, _swapped(actor, low, high))
    assert_refused(broken, case.graph, checked=r"expected (it after|the order of)")


@few
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_what_the_checker_accepts_finishes(data: st.DataObject, seed: int, cases: Cases, routes: Routes) -> None:
    """Plans shuffled at random either are refused or finish with any routes: the proof is sound."""
    case = data.draw(cases)
    choice = random.Random(seed)
    plan = case.plan
    accepted = 0
    for _ in range(12):
        number, index = choice.choice(_places(plan))
        actions = list(plan.actors[number].actions)
        action = actions.pop(index)
        actions.insert(max(0, index + choice.randint(-6, 6)), action)
        moved = _with(plan, number, actions)
        try:
            check(moved, case.graph)
        except PlanError:
            continue
        plan, accepted = moved, accepted + 1
        emulate(plan, case.graph, seed=seed, peers=routes(case.graph, seed))
    emulate(plan, case.graph, seed=seed)


@few
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_what_the_emulator_finds_the_checker_finds(data: st.DataObject, seed: int, cases: Cases) -> None:
    """A plan shuffled at random that hangs or mixes up microbatches on the emulator is refused by the checker."""
    case = data.draw(cases)
    choice = random.Random(seed)
    plan = case.plan
    for _ in range(choice.randint(1, 3)):
        number, index = choice.choice(_places(plan))
        actions = list(plan.actors[number].actions)
        actions.insert(choice.randint(0, len(actions) - 1), actions.pop(index))
        plan = _with(plan, number, actions)
    try:
        emulate(plan, case.graph, seed=seed)
    except PlanError:
        with pytest.raises(PlanError):
            check(plan, case.graph)


@few
@given(data=st.data())
def test_a_circle_of_modules_is_refused(data: st.DataObject, cases: Cases) -> None:
    """Arrows that lead back to where they began are refused before there is a plan."""
    graph = data.draw(cases).graph
    arrow = _pick(data, graph.arrows)
    with pytest.raises(ConfigError, match=r"edges without a circle"):
        attrs.evolve(graph, arrows=(*graph.arrows, arrow[::-1]))
