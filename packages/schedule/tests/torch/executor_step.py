"""A step of the executor on one rank, or on one end of an edge: graphs, programs, channels, and what is expected.

T rows of a pass, H columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule import ActionKind, Plan, Route, Timed, assemble, check, pipeline_route
from mimo.schedule.runtime import LOSS, Boundary, Channel, Executor, Progress
from mimo.topology import Grid, Module, ModuleGraph, StageId

WIDTH = 3


ROWS = (2, 0, 5, 1)
"""Rows of each microbatch: uneven, and one without any."""


VISION, FIRST, LAST = StageId("vision", 0), StageId("language", 0), StageId("language", 1)


Step = tuple[ActionKind, StageId, tuple[int, ...]]


class Product(torch.autograd.Function):
    """``x @ weight`` whose weight gradient may be deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: list[Callable[[], None]] | None) -> Tensor:
        """Return the product [T, H]."""
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Compute both gradients, or put the weight's off while ``later`` is open."""
        x, weight = ctx.saved_tensors
        if ctx.later is None or not ctx.later:
            return gradient @ weight.T, x.T @ gradient, None

        def add() -> None:
            deferred = x.T @ gradient
            weight.grad = deferred if weight.grad is None else weight.grad + deferred

        ctx.later.append(add)
        return gradient @ weight.T, None, None


@attrs.define(eq=False)
class Program:
    """A stage: the square of ``x @ weight``, where x is its inputs' sum, or its data; the sink's sum is a loss."""

    ports: tuple[str, ...]
    weight: Tensor
    data: Sequence[Tensor] = ()
    later: list[Any] = attrs.field(factory=list)
    calls: list[str] = attrs.field(factory=list)
    phases: list[str] = attrs.field(factory=list)
    products: list[weakref.ref[Any]] = attrs.field(factory=list)
    live: list[int] = attrs.field(factory=list)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a pass, and count how many products of passes before it still have storage."""
        self.live.append(sum(product() is not None for product in self.products))
        self.calls.append(f"forward {microbatches}")
        x = sum(inputs.values()) if inputs else torch.cat([self.data[microbatch] for microbatch in microbatches])
        product = cast("Tensor", Product.apply(x, self.weight, self.later))  # type: ignore[no-untyped-call]
        self.products.append(weakref.ref(product.untyped_storage()))
        rows = product * product
        return dict.fromkeys(self.ports, rows) if self.ports else {LOSS: rows.sum()}

    @contextmanager
    def defer_weight_grads(self) -> Iterator[Callable[[], None]]:
        """Defer the weight's gradient."""
        self.calls.append("later")
        taken: list[Callable[[], None]] = []
        self.later.append("open")

        def add() -> None:
            for one in taken:
                one()

        try:
            yield add
        finally:
            taken += self.later[1:]
            self.later.clear()

    @contextmanager
    def on_compute(self, phase: str) -> Iterator[None]:
        """Note it."""
        self.phases += [phase, ""]
        yield
        self.phases[-1] = "over"

    @contextmanager
    def on_grad_accumulation(self, deferred: Callable[[], None] | None, *, last: bool) -> Iterator[None]:
        """Note it."""
        self.phases.append("adds" if deferred is None else "adds later")
        yield
        self.phases.append("added last" if last else "added")

    def reduce_gradients(self) -> None:
        """Note it."""
        self.calls.append("reduce")

    def reduce_tied(self) -> None:
        """Nothing is tied."""
        raise AssertionError


def graph_of(*, language: tuple[int, ...] = (0,), vision: bool = True, batch_factor: int = 1) -> ModuleGraph:
    """Return an encoder on rank 0 that feeds a language model of two stages, both on one rank."""
    return ModuleGraph(
        modules=(
            Module(grid=Grid(name="vision", ranks=(0,)), trains=(vision,), batch_factor=batch_factor),
            Module(grid=Grid(name="language", ranks=language), trains=(True, True), chunks=2),
        ),
        arrows=(("vision", "language"),),
    )


def in_turn(graph: ModuleGraph, steps: Sequence[Step]) -> Plan:
    """Return the plan that does computations one after the other, proved."""
    timed = [
        Timed(kind=kind, stage=stage, microbatches=microbatches, start=at, finish=at + 1)
        for at, (kind, stage, microbatches) in enumerate(steps)
    ]
    plan = assemble("by hand", graph, 1 + max(microbatches[-1] for _, _, microbatches in steps), timed)
    check(plan, graph)
    return plan


def steps_of(graph: ModuleGraph, backward: Sequence[ActionKind] = ("backward",), count: int = len(ROWS)) -> list[Step]:
    """Return all forwards, then all backwards, in the passes of each stage's module."""
    stages = [stage for stage in graph.stages if graph.runs_backward(stage)]
    return [
        *(("forward", stage, served) for stage in graph.stages for served in graph.by_name[stage.module].passes(count)),
        *(
            (kind, stage, served)
            for kind in backward
            for stage in reversed(stages)
            for served in graph.by_name[stage.module].passes(count)
        ),
    ]


@attrs.define
class Clock:
    """Time that passes only on request."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@attrs.frozen
class Exchange:
    """A message that has come or left once waited for, which takes 5 seconds."""

    clock: Clock

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return True

    def wait(self) -> None:
        """Let the time pass."""
        self.clock.now += 5


@attrs.frozen(kw_only=True)
class Line(Channel):
    """A channel to nowhere, from which ones come."""

    group: dist.ProcessGroup | None = None
    tag: int = 0
    clock: Clock = attrs.field(factory=Clock)

    def send(self, rows: Tensor, peer: int) -> dist.Work:
        """Forget the rows."""
        assert rows.is_contiguous(), peer
        return cast("dist.Work", Exchange(self.clock))

    def receive(self, rows: Tensor, peer: int) -> dist.Work:
        """Fill the rows."""
        del peer
        rows.fill_(1)
        return cast("dist.Work", Exchange(self.clock))


def executor_of(
    graph: ModuleGraph,
    programs: Mapping[StageId, Any],
    rank: int = 0,
    line: Line | None = None,
    progress: Progress | None = None,
) -> Executor:
    """Return the executor of a rank; with others it talks over ``line``."""
    channel = line or Line()
    channels: tuple[Channel, Channel] = (channel, channel)
    boundaries = {
        edge.name: Boundary(
            rank=rank,
            width=WIDTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
            channels=channels,
            source_group=None,
            target_group=None,
            edge=edge.name,
            progress=progress,
        )
        for edge in graph.edges
        if programs.keys() & {edge.source, edge.target}
    }
    return Executor(graph, rank=rank, programs=programs, boundaries=boundaries, progress=progress)


def at_home(_edge: str, microbatch: int) -> Route:
    """Route within rank 0."""
    return pipeline_route(Grid(name="any", ranks=(0,)), rank=0, source=0, target=0, rows=ROWS[microbatch])


def programs_of(graph: ModuleGraph) -> dict[StageId, Program]:
    """Return a program for each stage, with the same weights each time."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(rows, WIDTH, generator=generator) for rows in ROWS]
    return {
        stage: Program(
            ports=tuple(edge.name for edge in graph.outputs(stage)),
            weight=torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_(
                graph.by_name[stage.module].trains[stage.stage]
            ),
            data=() if graph.inputs(stage) else data,
        )
        for stage in graph.stages
    }


def truth(graph: ModuleGraph) -> dict[StageId, Tensor | None]:
    """Return the gradients of all weights as plain autograd has them."""
    programs = programs_of(graph)
    rows: dict[StageId, Tensor] = {}
    for stage, program in programs.items():
        sources = [rows[edge.source] for edge in graph.inputs(stage)]
        x = torch.stack(sources).sum(0) if sources else torch.cat(list(program.data))
        rows[stage] = (x @ program.weight).square()
    torch.stack([found.sum() for stage, found in rows.items() if not graph.outputs(stage)]).sum().backward()
    return {stage: program.weight.grad for stage, program in programs.items()}


def compare(programs: Mapping[StageId, Program], expected: Mapping[StageId, Tensor | None]) -> None:
    """Assert that all gradients are as expected."""
    for stage, gradient in expected.items():
        torch.testing.assert_close(programs[stage].weight.grad, gradient, msg=str(stage))


SPLIT: tuple[ActionKind, ...] = ("input-gradient", "weight-gradient")


@attrs.define(eq=False)
class Ends:
    """A stage whose backward needs neither its input's values nor its output's; it watches the storage of both."""

    port: str | None
    rows: Sequence[int] = ROWS
    weight: Tensor = attrs.field(factory=lambda: torch.ones(WIDTH, requires_grad=True))
    given: list[weakref.ref[Any]] = attrs.field(factory=list)
    made: list[weakref.ref[Any]] = attrs.field(factory=list)
    live: list[tuple[int, int]] = attrs.field(factory=list)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add the weight."""
        (microbatch,) = microbatches
        if microbatch == len(self.rows) - 1:
            counts = [sum(one() is not None for one in found) for found in (self.given, self.made)]
            self.live.append((counts[0], counts[1]))
        x = next(iter(inputs.values()), torch.ones(self.rows[microbatch], WIDTH))
        self.given.append(weakref.ref(x.untyped_storage()))
        rows = x + self.weight
        self.made.append(weakref.ref(rows.untyped_storage()))
        return {LOSS: rows.sum()} if self.port is None else {self.port: rows}

    def on_compute(self, _phase: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def on_grad_accumulation(self, _deferred: Callable[[], None] | None, *, last: bool) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


def separate(rank: int, counts: Sequence[int] = ROWS) -> Callable[[str, int], Route]:
    """Route from rank 0 to rank 1, and within rank 1."""
    between = Grid(name="any", ranks=(0, 1), pp=2)

    def route(edge: str, microbatch: int) -> Route:
        target, rows = 1, counts[microbatch]
        return pipeline_route(between, rank=rank, source=0 if "->" in edge else 1, target=target, rows=rows)

    return route


def only(plan: Plan, rank: int, kinds: set[str]) -> Plan:
    """Return a plan of some of a rank's actions."""
    actor = next(actor for actor in plan.actors if rank in actor.ranks)
    actions = tuple(action for action in actor.actions if action.kind in kinds)
    return attrs.evolve(plan, actors=(attrs.evolve(actor, actions=actions),))
