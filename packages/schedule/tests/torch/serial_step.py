"""A step on a `Cluster`: the engine's own executor, boundaries and plan, with programs that compute nothing.

They know what each row must hold, and come to the collectives of their stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from serial_cluster import Call, Cluster, Needs, SerialChannel
from torch import Tensor

from mimo.schedule import Plan, PlanPhase, Route, RoutePiece
from mimo.schedule.runtime import LOSS, Boundary, Executor
from mimo.topology import Edge, ModuleGraph, StageId

WIDTH = 1
Pairs = Callable[[Edge, int], Sequence[tuple[int, int]]]
"""``(edge, microbatch)`` to the pairs of ranks (source, target) that exchange rows."""
Overlap = Literal["none", "beside", "holding"]
"""Whether an optimizer's collectives begin while layers compute: then they progress beside all else, or hold up their
rank as any other call."""
_SUMS = 2
"""Of a stage, each of other parameters."""


def value_of(edge: str, microbatch: int, *, gradient: bool) -> float:
    """Return what all rows of a microbatch hold on an edge, one way."""
    return float(1 + 2 * microbatch + gradient + 1000 * (sum(map(ord, edge)) % 97))


class _Rows(torch.autograd.Function):
    """Rows of a stage's outputs from those of its inputs, and gradients the other way."""

    @staticmethod
    def forward(ctx: Any, program: Program, microbatches: tuple[int, ...], _weight: Tensor, *inputs: Tensor) -> Any:
        """Return the rows of each output, or a loss."""
        ctx.program, ctx.microbatches, ctx.count = program, microbatches, len(inputs)
        return tuple(program.rows(edge, microbatches, held=True) for edge in program.outputs) or torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Look at the gradients that came, and return those of the inputs."""
        program: Program = ctx.program
        for edge, gradient in zip(program.outputs, gradients, strict=False):
            if edge.gradient:
                program.check(edge, ctx.microbatches, gradient, held=True)
        back = [program.rows(edge, ctx.microbatches, held=False) for edge in program.inputs]
        return None, None, torch.zeros(()), *back


@attrs.define(eq=False)
class Program:
    """A stage that meets its group in each computation, and knows what each row must hold."""

    stage: StageId
    graph: ModuleGraph
    rank: int
    cluster: Cluster
    route: Callable[[str, int], Route]
    microbatches: int
    overlap: Overlap = "none"
    weight: Tensor = attrs.field(factory=lambda: torch.zeros((), requires_grad=True))

    _begun: list[Needs] = attrs.field(factory=list)

    @property
    def inputs(self) -> tuple[Edge, ...]:
        """Edges into it."""
        return self.graph.inputs(self.stage)

    @property
    def outputs(self) -> tuple[Edge, ...]:
        """Edges out of it."""
        return self.graph.outputs(self.stage)

    def rows(self, edge: Edge, microbatches: tuple[int, ...], *, held: bool) -> Tensor:
        """Return the rows of an edge that leave a pass: those held forward, the gradients of those wanted back."""
        routes = [(microbatch, self.route(edge.name, microbatch)) for microbatch in microbatches]
        values = [
            torch.full((route.held if held else route.wanted, WIDTH), self._value(edge, microbatch, gradient=not held))
            for microbatch, route in routes
        ]
        return torch.cat(values)

    def check(self, edge: Edge, microbatches: tuple[int, ...], rows: Tensor, *, held: bool) -> None:
        """Hold that rows that came, or gradients of those held, are the ones of these microbatches."""
        routes = [(microbatch, self.route(edge.name, microbatch)) for microbatch in microbatches]
        parts = rows.split([route.held if held else route.wanted for _, route in routes])
        for (microbatch, _), part in zip(routes, parts, strict=True):
            expected = self._value(edge, microbatch, gradient=held)
            assert bool((part == expected).all()), f"{edge.name}, microbatch {microbatch}: rows of another"

    def _value(self, edge: Edge, microbatch: int, *, gradient: bool) -> float:
        return value_of(edge.name, microbatch % self.microbatches, gradient=gradient)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Look at what came, and make what leaves."""
        for edge in self.inputs:
            self.check(edge, microbatches, inputs[edge.name], held=False)
        made = _Rows.apply(self, microbatches, self.weight, *(inputs[edge.name] for edge in self.inputs))  # type: ignore[no-untyped-call]
        if not self.outputs:
            return {LOSS: made}
        return {edge.name: rows for edge, rows in zip(self.outputs, made, strict=True)}

    def gather_parameters(self) -> None:
        """Begin to gather parameters from all ranks of the stage, for its next computation."""
        if self._trains:
            self._begin("gather")

    @contextmanager
    def on_compute(self, _phase: str) -> Iterator[None]:
        """Wait for parameters, and meet the group that computes together."""
        self._end()
        self._meet("computation")
        yield

    @contextmanager
    def defer_weight_grads(self) -> Iterator[Callable[[], None]]:
        """Meet again for the second part, if lanes gather there."""
        gathers = self.graph.by_name[self.stage.module].gathers
        yield (lambda: self._meet("computation")) if gathers else (lambda: None)

    @contextmanager
    def on_grad_accumulation(self, _deferred: object, *, last: bool) -> Iterator[None]:
        """Begin the sums over all ranks of the stage, if they are to overlap with what follows."""
        yield
        if last and self.overlap != "none":
            for number in range(_SUMS):
                self._begin(f"sum {number}")

    def reduce_gradients(self) -> None:
        """Meet all ranks of the stage, or wait for the sums that have begun."""
        if self.overlap == "none":
            self._meet("sum", self.graph.stage_ranks(self.stage))
        self._end()

    def reduce_tied(self) -> None:
        """Meet the rank that has the other copy."""
        column = self.graph.by_name[self.stage.module].grid.group_of(self.rank, ("pp",))
        self._meet("tied sum", (column[0], column[-1]))

    @property
    def _trains(self) -> bool:
        return self.graph.by_name[self.stage.module].trains[self.stage.stage]

    def _begin(self, what: str) -> None:
        """Come to a collective of all ranks of the stage, on a communicator that nothing else uses."""
        calls = self._calls(f"{what} beside stage {self.stage.stage}", self.graph.stage_ranks(self.stage))
        self._begun.append(self.cluster.begin(calls))
        if self.overlap == "holding":
            self._end()

    def _end(self) -> None:
        while self._begun:
            self.cluster.wait(self.rank, self._begun.pop(0))

    def _meet(self, what: str, ranks: tuple[int, ...] = ()) -> None:
        if not ranks:
            module = self.graph.by_name[self.stage.module]
            stage, size = module.stage_ranks(self.stage.stage), module.meeting_size
            first = stage.index(self.rank) // size * size
            ranks = stage[first : first + size]
        self.cluster.come(self.rank, self._calls(what, ranks))

    def _calls(self, what: str, ranks: tuple[int, ...]) -> Sequence[tuple[Call, Call]]:
        where = f"{what} of {self.stage.module} on {list(ranks)}"
        return [((where, self.rank), (where, other)) for other in ranks if other != self.rank]


@attrs.frozen(kw_only=True)
class Fault:
    """What is planted on some ranks: other lists, batches that are split, or a peer that is left out.

    Args:
        plans: by rank.
        splits: ranks whose batches begin message by message.
        leaves_out: by rank, the channel and the peer.
    """

    plans: Mapping[int, Plan] = attrs.field(factory=dict)
    splits: frozenset[int] = frozenset()
    leaves_out: Mapping[int, tuple[str, int]] = attrs.field(factory=dict)


NO_FAULT = Fault()


def routing(pairs: Pairs, graph: ModuleGraph, microbatches: int, rank: int) -> Callable[[str, int], Route]:
    """Return a rank's routes: two rows for each pair."""
    edges = {edge.name: edge for edge in graph.edges}

    def route(name: str, microbatch: int) -> Route:
        edge = edges[name]
        chosen = pairs(edge, microbatch % microbatches)
        sends, receives = (
            tuple(
                RoutePiece(peer, ((2 * place, 2 * place + 2),))
                for place, peer in enumerate(pair[not end] for pair in chosen if pair[end] == rank)
            )
            for end in (0, 1)
        )
        return Route(held=2 * len(sends), sends=sends, wanted=2 * len(receives), receives=receives)

    return route


def run_step(
    graph: ModuleGraph, plan: Plan, pairs: Pairs, fault: Fault = NO_FAULT, *, overlap: Overlap = "none"
) -> None:
    """Run a step of a plan on all ranks, or where modules work ahead a first, a middle and a last one.

    Raises:
        HangError: all ranks wait for one another; its text says who waits for whom.
        AssertionError: rows came that belong elsewhere, or too many, or none.
    """
    cluster = Cluster(graph.ranks)
    ahead = any(module.prefetch for module in graph.modules)
    phases: Sequence[PlanPhase] = ("next", "both", "this") if ahead else ("both",)

    def work(rank: int) -> None:
        route = routing(pairs, graph, plan.microbatches, rank)
        stages = graph.role(rank).stages
        programs: Any = {
            stage: Program(stage, graph, rank, cluster, route, plan.microbatches, overlap) for stage in stages
        }
        boundaries = {
            edge.name: Boundary(
                rank=rank,
                width=WIDTH,
                dtype=torch.float32,
                device=torch.device("cpu"),
                channels=(channel(rank, edge, "rows"), channel(rank, edge, "gradients")),
                source_group=None,
                target_group=None,
                edge=edge.name,
            )
            for edge in graph.edges
            if {edge.source, edge.target} & set(stages)
        }
        executor = Executor(graph, rank=rank, programs=programs, boundaries=boundaries)
        for phase in phases:
            for program in programs.values() if overlap != "none" else ():
                program.gather_parameters()
            executor.run(fault.plans.get(rank, plan), route, phase=phase)

    def channel(rank: int, edge: Edge, way: str) -> SerialChannel:
        name = f"{edge.name} {way}"
        where, peer = fault.leaves_out.get(rank, ("", -1))
        return SerialChannel(
            name=name,
            rank=rank,
            cluster=cluster,
            batches=rank not in fault.splits,
            leaves_out=peer if where == name else -1,
        )

    cluster.run(work)
