"""What of graph and costs all actors share while the simulator runs, looked up once for each stage and edge."""

from __future__ import annotations

from mimo.schedule.plan import Action, Costs, Wiring
from mimo.schedule.simulator.clock import Direction
from mimo.topology import ModuleGraph


class CostLookup:
    """Ends of edges, who meets whom, and seconds; actors are numbered as in ``graph.actors``.

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
        self._ways: dict[tuple[str, bool, int], Direction] = {}

    def is_target(self, edge: str, message: Action) -> bool:
        """Tell whether a send or receive is at the target of its edge."""
        return self._targets[edge] == (message.module, message.stage)

    def feeds(self, computation: Action) -> tuple[tuple[str, bool], ...]:
        """Return the edges whose messages a computation needs, and whether they are gradients."""
        return self._feeding.get((computation.kind, computation.module, computation.stage), ())

    def way(self, edge: str, *, gradient: bool, microbatches: int) -> Direction:
        """Return how a message of so many microbatches goes along an edge, or as gradients back."""
        key = (edge, gradient, microbatches)
        way = self._ways.get(key)
        if way is None:
            found, holders = self._wiring.edges[edge], self._wiring.holders
            source, target = (found.target, found.source) if gradient else (found.source, found.target)
            way = self._ways[key] = Direction(
                seconds=self._costs.message(self._graph, found, microbatches),
                source=source.module,
                target=target.module,
                targets=self._graph.stage_ranks(target),
                receivers=len(holders[target]),
                senders=len(holders[source]),
            )
        return way

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
        key = (action.kind, action.module, action.stage, len(action.microbatches), action.edge)
        seconds = self._seconds.get(key)
        if seconds is None:
            cost = self._costs.stages[action.stage_id]
            whole = action.edge is None
            seconds = cost.seconds(action.kind, len(action.microbatches)) if whole else cost.reduce_tied
            self._seconds[key] = seconds
        return seconds
