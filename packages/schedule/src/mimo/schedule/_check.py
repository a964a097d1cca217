"""The checker: proves of any plan, however made, that it does the whole step and cannot deadlock.

Three questions, each linear in the number of actions: is every list complete and possible by itself (`_deeds`), do the
lists agree on the order of what they share (here), and do no actors wait for each other in a circle (`_waiting`)?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mimo.hooks import PlanError
from mimo.schedule._deeds import check_deeds
from mimo.schedule._in_flight import in_flight
from mimo.schedule._plan import Action, ActionKind, ActorPlan, Plan
from mimo.schedule._texts import action_text, place_text, ranks_text, stage_text
from mimo.schedule._waiting import check_waiting
from mimo.schedule._wiring import Channel, Wiring
from mimo.topology import ModuleGraph, StageId


def check(plan: Plan, graph: ModuleGraph, *, max_in_flight: Mapping[StageId, int] | None = None) -> None:
    """Prove that ``plan`` does one whole step of ``graph`` and that no circle of waiting can arise in it.

    Proved are: every stage's forward, and backward where it runs one (as ``backward``, or as ``input-gradient`` and
    ``weight-gradient``), once for each microbatch on every actor that holds the stage and on no other; every message
    sent and received once by each actor at its ends; every action behind what it needs; a reduction of each stage
    that trains, behind its last backward; one order at all ends of a channel and for all members of a collective; and
    progress, where a send waits for the receives of all its receivers, a computation for the sends of all that it
    receives, and a collective for all its members, while a receive is posted without waiting.

    Args:
        plan: the plan; nothing is assumed of where it came from.
        graph: the module graph that it is for.
        max_in_flight: for some or all stages, how many microbatches may be in flight there (see `in_flight`).

    Raises:
        PlanError: the plan is wrong; its text names the actor, the action and the cause.
    """
    wiring = Wiring(graph=graph)
    actors = _in_graph_order(plan, graph)
    if plan.microbatches < 1:
        raise PlanError("plan", expected="1 or more microbatches", got=str(plan.microbatches))
    for actor, owner in zip(actors, graph.actors, strict=True):
        check_deeds(actor, owner.stages, plan.microbatches, wiring)
    _check_orders(actors, wiring)
    check_waiting(actors, wiring)
    if max_in_flight is not None:
        _check_in_flight(plan, wiring, max_in_flight)


def _in_graph_order(plan: Plan, graph: ModuleGraph) -> tuple[ActorPlan, ...]:
    wanted, found = Counter(actor.ranks for actor in graph.actors), Counter(actor.ranks for actor in plan.actors)
    for ranks in wanted | found:
        if wanted[ranks] != found[ranks]:
            raise PlanError(
                f"plan, {ranks_text(ranks)}",
                expected=f"{wanted[ranks]} lists of actions"
                + (
                    ", one for all ranks of the same role" if wanted[ranks] else ", as these are no such group of ranks"
                ),
                got=str(found[ranks]),
            )
    by_ranks = {actor.ranks: actor for actor in plan.actors}
    return tuple(by_ranks[actor.ranks] for actor in graph.actors)


def _check_orders(actors: tuple[ActorPlan, ...], wiring: Wiring) -> None:
    """Refuse messages of one channel, or collectives of one group, that its members list in different orders.

    Nothing else tells them apart: a channel or group matches the n-th operation of one member with the n-th of another.
    """
    first: dict[Channel | StageId, tuple[ActorPlan, list[int]]] = {}
    for actor in actors:
        lines: dict[tuple[Channel | StageId, ActionKind | None], list[int]] = {}
        for index, action in enumerate(actor.actions):
            if action.kind in ("send", "receive"):
                lines.setdefault((wiring.channel(action), action.kind), []).append(index)
            elif action.kind != "reduce" and wiring.gathers(action.stage_id):
                lines.setdefault((action.stage_id, None), []).append(index)
        for (line, _), indices in lines.items():
            other, other_indices = first.setdefault(line, (actor, indices))
            for index, other_index in zip(indices, other_indices, strict=False):
                action, match = actor.actions[index], other.actions[other_index]
                if not _same(action, match):
                    raise PlanError(
                        place_text(actor.ranks, index, action),
                        expected=f"the order of {ranks_text(other.ranks)}, which here list "
                        f"{action_text(match)} (action {other_index})",
                        got="another",
                        fix="Members of a channel or group match their operations by order alone.",
                    )


def _same(action: Action, match: Action) -> bool:
    kinds = {action.kind, match.kind}
    return action.microbatches == match.microbatches and (len(kinds) == 1 or kinds == {"send", "receive"})


def _check_in_flight(plan: Plan, wiring: Wiring, bounds: Mapping[StageId, int]) -> None:
    for stage, count in in_flight(plan).items():
        bound = bounds.get(stage, count)
        if count > bound:
            ranks = sorted(rank for number in wiring.holders[stage] for rank in wiring.graph.actors[number].ranks)
            raise PlanError(
                f"plan, {ranks_text(ranks)}, forward of {stage_text(stage)}",
                expected=f"at most {bound} microbatches in flight",
                got=str(count),
            )
