"""Look-ups in the graph and the costs that all actors share, made once for each stage and edge."""

from __future__ import annotations

from mimo.schedule.plan import Action, Costs, Wiring
from mimo.schedule.simulator.clock import Direction
from mimo.topology import ModuleGraph


class CostLookup:
    """Ends of edges, actors that wait for each other, and seconds; actors are numbered as in ``graph.actors``.

    Args:
        graph: the module graph.
        costs: of that graph.
    """

    def __init__(self, graph: ModuleGraph, costs: Costs) -> None:
        self._costs = costs
        self._graph = graph
        self._wiring = Wiring(graph=graph)
        self._targets, self._feeding = self._wiring.targets, self._wiring.feeding
        self._members: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._directions: dict[tuple[str, bool, int], Direction] = {}

    def is_target(self, edge: str, message: Action) -> bool:
        """Return whether the stage that sends or receives a message is the target of the edge."""
        return self._targets[edge] == (message.module, message.stage)

    def feeds(self, computation: Action) -> tuple[tuple[str, bool], ...]:
        """Return the edges whose messages a computation needs, each with whether these are gradients."""
        return self._feeding.get((computation.kind, computation.module, computation.stage), ())

    def direction(self, edge: str, *, gradient: bool, microbatches: int) -> Direction:
        """Return how a message of ``microbatches`` travels on an edge: rows to the target, gradients to the source."""
        key = (edge, gradient, microbatches)
        direction = self._directions.get(key)
        if direction is None:
            ends, holders = self._wiring.edges[edge], self._wiring.holders
            source, target = (ends.target, ends.source) if gradient else (ends.source, ends.target)
            direction = self._directions[key] = Direction(
                seconds=self._costs.message(self._graph, ends, microbatches),
                source=source.module,
                target=target.module,
                targets=self._graph.stage_ranks(target),
                receivers=len(holders[target]),
                senders=len(holders[source]),
            )
        return direction

    def members(self, number: int, action: Action) -> tuple[int, ...]:
        """Return the actors that enter a computation or reduction together with actor ``number``, itself included."""
        key = (action.kind, action.module, action.stage, action.edge, number)
        members = self._members.get(key)
        if members is None:
            members = self._members[key] = self._find_members(number, action)
        return members

    def _find_members(self, number: int, action: Action) -> tuple[int, ...]:
        if action.kind != "reduce":
            return self._wiring.meeting(action.stage_id, number) if self._wiring.gathers(action) else (number,)
        if action.edge is None:
            return self._wiring.holders[action.stage_id]
        tied = self._wiring.tied_stages(action.module)
        return tuple(sorted({holder for stage in tied for holder in self._wiring.holders[stage]}))

    def seconds(self, action: Action) -> float:
        """Return the time of a computation or reduction."""
        load = self._costs.load(action.module, action.microbatches)
        key = (action.kind, action.module, action.stage, load, action.edge)
        seconds = self._seconds.get(key)
        if seconds is None:
            cost = self._costs.stages[action.stage_id]
            is_tied = action.edge is not None
            seconds = cost.reduce_tied if is_tied else cost.seconds(action.kind, load)
            self._seconds[key] = seconds
        return seconds
