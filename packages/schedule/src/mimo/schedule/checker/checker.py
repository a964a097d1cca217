"""The checker: proves of any plan, however made, that it does the whole step and cannot deadlock.

Three questions, each linear in the number of actions: is every list complete and possible by itself (`check_actor`),
do lists agree on the order of what they share (`check_matching`), and do no actors wait for each other in a circle
(`check_waiting`)?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mimo.hooks import PlanError
from mimo.schedule.checker.activations import in_flight, peak_activations
from mimo.schedule.checker.check_actor import check_actor
from mimo.schedule.checker.check_matching import check_matching
from mimo.schedule.checker.check_waiting import check_waiting
from mimo.schedule.plan import ActorPlan, Costs, Plan, Wiring, ranks_text, stage_text
from mimo.topology import ModuleGraph, StageId


def check(
    plan: Plan,
    graph: ModuleGraph,
    *,
    max_in_flight: Mapping[StageId, int] | None = None,
    max_bytes: Mapping[int, int] | None = None,
    costs: Costs | None = None,
) -> None:
    """Prove that ``plan`` does one whole step of ``graph`` and that no circle of waiting can arise in it.

    Proved are: every stage's forward, and backward where it runs one (as ``backward``, or as ``input-gradient`` and
    ``weight-gradient``), once for each pass of its module on every actor that holds the stage and on no other; every
    message sent and received once by each actor at its ends; every action behind what it needs; a reduction of each
    stage that trains, behind its last backward; one order at all ends of a channel and for all members of a
    collective; and progress, where an actor does one thing at a time, and a message is over when all its senders and
    receivers have come to it, a collective when all its members have. An actor at both ends of an edge receives and
    sends in one batch: it lists its send right behind the receive. What a backward computes again, with its
    collectives, lies inside it, or inside its input gradient; a weight gradient has no collectives.

    Of a module with ``prefetch`` the microbatches are the next step's, while the rows of this step's that it sends are
    there from the start. Progress is then proved for each phase alone too (`Plan.phase`), as the first and last steps
    of a run do them.

    Args:
        plan: the plan; nothing is assumed of where it came from.
        graph: the module graph that it is for.
        max_in_flight: for some or all stages, how many microbatches may be in flight there (see `in_flight`).
        max_bytes: for some or all ranks, the bytes of activations that they may keep at once, without rows that wait to
            be sent (see `peak_activations`).
        costs: of the graph, from which bytes are taken; needed with ``max_bytes`` alone.

    Raises:
        PlanError: the plan is wrong; its text names the actor, the action and the cause.
    """
    wiring = Wiring(graph=graph)
    actors = _in_graph_order(plan, graph)
    if plan.microbatches < 1:
        raise PlanError("plan", expected="1 or more microbatches", got=str(plan.microbatches))
    for actor, owner in zip(actors, graph.actors, strict=True):
        check_actor(actor, owner.stages, plan.microbatches, wiring)
    check_matching(actors, wiring)
    check_waiting(actors, wiring)
    if any(module.prefetch for module in graph.modules):
        for phase in ("next", "this"):
            check_waiting(_in_graph_order(plan.phase(phase), graph), wiring)
    if max_in_flight is not None:
        _check_in_flight(plan, wiring, max_in_flight)
    if max_bytes is not None:
        assert costs is not None, "bytes are those of costs"
        _check_bytes(plan, graph, costs, max_bytes)


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


def _check_bytes(plan: Plan, graph: ModuleGraph, costs: Costs, bounds: Mapping[int, int]) -> None:
    for rank, peak in peak_activations(plan, graph, costs, unsent=False).items():
        bound = bounds.get(rank, peak.bytes)
        if peak.bytes > bound:
            modules = ", ".join(
                f"{name} up to {each.microbatches} microbatches, {each.bytes} bytes"
                for name, each in peak.modules.items()
            )
            raise PlanError(
                f"plan, rank {rank}",
                expected=f"at most {bound} bytes of activations at once",
                got=f"{peak.bytes}: {modules}",
                fix=f"Allow {peak.bytes}, or choose a schedule that keeps less.",
            )
