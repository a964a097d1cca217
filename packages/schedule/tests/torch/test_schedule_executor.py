"""The executor on one rank, and on one end of an edge: passes, split backward, what is kept, and the record.

T rows of a pass, H columns.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule import Action, ActionKind, Plan, Route, Timed, assemble, check, pipeline_route
from mimo.schedule.runtime import LOSS, Boundary, Channel, Executor, Progress, Record
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
    rows = torch.cat(list(programs[VISION].data))
    for program in programs.values():
        rows = (rows @ program.weight).square()
    rows.sum().backward()
    return {stage: program.weight.grad for stage, program in programs.items()}


def compare(programs: Mapping[StageId, Program], expected: Mapping[StageId, Tensor | None]) -> None:
    """Assert that all gradients are as expected."""
    for stage, gradient in expected.items():
        torch.testing.assert_close(programs[stage].weight.grad, gradient, msg=str(stage))


SPLIT: tuple[ActionKind, ...] = ("input-gradient", "weight-gradient")


@pytest.mark.parametrize("vision", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("backward", [("backward",), SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("batch_factor", [1, 2, 3, 4])
def test_schedule_executor_gives_the_gradients_of_plain_autograd(
    batch_factor: int, backward: tuple[ActionKind, ...], vision: bool
) -> None:
    """Whatever one pass serves, whether weights come later, and with edges between stages of one rank."""
    graph = graph_of(vision=vision, batch_factor=batch_factor)
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph, backward)), at_home)
    compare(programs, truth(graph))
    passes = graph.by_name["vision"].passes(len(ROWS))
    assert [call for call in programs[VISION].calls if call.startswith("forward")] == [f"forward {it}" for it in passes]
    split = backward == SPLIT
    assert programs[VISION].calls.count("later") == (len(passes) if split and vision else 0)
    assert programs[LAST].calls.count("later") == (len(ROWS) if split else 0)


def test_schedule_executor_adds_deferred_gradients_when_their_turn_comes() -> None:
    """Until then, no weight has a gradient, the first stage's included, which has no input gradient to compute."""
    graph = graph_of()
    programs = programs_of(graph)
    seen: list[list[bool]] = []

    @attrs.frozen
    class Watched:
        inner: Program

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def reduce_gradients(self) -> None:
            seen.append([program.weight.grad is not None for program in programs.values()])

    steps = steps_of(graph, SPLIT)
    weights = [step for step in steps if step[0] == "weight-gradient"]
    later = [*(step for step in steps if step not in weights), *sorted(weights, key=lambda step: step[1])]
    watched = {stage: Watched(program) for stage, program in programs.items()}
    executor_of(graph, watched).run(in_turn(graph, later), at_home)
    assert seen == [[False, True, False], [False, True, True], [True, True, True]]
    compare(programs, truth(graph))


@pytest.mark.parametrize("left", ["weight-gradient", "backward"])
def test_schedule_executor_asserts_that_nothing_is_left_over(left: ActionKind) -> None:
    """A plan that was not proved and forgets a gradient does not pass for a step."""
    graph = graph_of()
    steps = steps_of(graph, SPLIT if left == "weight-gradient" else ("backward",))
    plan = in_turn(graph, steps)
    (actor,) = plan.actors
    forgotten = next(action for action in actor.actions if action.kind == left and action.stage_id == VISION)
    actions = tuple(action for action in actor.actions if action != forgotten)
    plan = attrs.evolve(plan, actors=(attrs.evolve(actor, actions=actions),))
    with pytest.raises(AssertionError, match="never computed" if left == "weight-gradient" else "without a backward"):
        executor_of(graph, programs_of(graph)).run(plan, at_home)


def test_schedule_executor_keeps_activations_until_their_backward_and_no_longer() -> None:
    """Of one microbatch at a time, however many there are, and nothing after the step."""
    graph = graph_of()
    steps: list[Step] = []
    for microbatch in range(len(ROWS)):
        steps += [("forward", stage, (microbatch,)) for stage in graph.stages]
        steps += [("backward", stage, (microbatch,)) for stage in reversed(graph.stages)]
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps), at_home)
    assert {stage: program.live for stage, program in programs.items()} == dict.fromkeys(graph.stages, [0] * len(ROWS))
    gathered = programs_of(graph)
    executor_of(graph, gathered).run(in_turn(graph, steps_of(graph)), at_home)
    assert gathered[LAST].live == [0, 1, 2, 3]  # as many as are in flight: the count shows it
    assert not [product for program in gathered.values() for product in program.products if product() is not None]


def test_schedule_executor_keeps_nothing_of_what_is_frozen() -> None:
    """A stage without backward keeps no activations while those behind it do."""
    graph = graph_of(vision=False)
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph)), at_home)
    assert programs[VISION].live == [0] * len(ROWS)


@pytest.mark.parametrize("backward", [("backward",), SPLIT], ids=["whole", "split"])
def test_schedule_executor_announces_when_a_stage_computes_and_adds(backward: tuple[ActionKind, ...]) -> None:
    """Each forward and backward has its bounds, a pass without rows too, and the last that adds is known as such."""
    graph = graph_of()
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph, backward)), at_home)
    is_whole, times = len(backward) == 1, len(ROWS)
    computes = ["backward", "over"]
    passes = [["adds", *computes, "added"] if is_whole else computes for _ in ROWS]
    later = [] if is_whole else [["adds later", "added"] for _ in ROWS]
    expected = [phase for each in (*passes, *later) for phase in each]
    expected[-1] = "added last"
    assert programs[VISION].phases == ["forward", "over"] * times + expected


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


def test_schedule_executor_lets_go_of_outputs_that_have_left_and_of_inputs_that_are_read() -> None:
    """Before their backward, where autograd does not need them: the graph's ends are kept, not their tensors."""
    counts = 2 * ROWS
    graph = graph_of(language=(1,))
    plan = in_turn(graph, steps_of(graph, count=len(counts)))
    kinds = {"forward", "send", "backward", "receive"}
    source, target = Ends("vision->language", counts), Ends("language.0-1", counts)
    sending: Any = {VISION: source}
    executor_of(graph, sending, 0, Line()).run(only(plan, 0, kinds), separate(0, counts))
    assert source.live == [(0, 4)]  # a channel keeps its last four messages until they have been waited for
    assert source.weight.grad is not None
    receiving: Any = {FIRST: target, LAST: Ends(None, counts)}
    executor_of(graph, receiving, 1, Line()).run(only(plan, 1, kinds), separate(1, counts))
    assert target.live == [(0, 5)]  # all rows that the next stage, which has yet to begin, is to read
    assert target.weight.grad is not None


def test_schedule_record_separates_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action has its moment, in order; rows take 5 seconds to come, and a forward 3 to compute."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)

    class Slow(Ends):
        def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            clock.now += 3
            return super().forward(microbatches, inputs)

    graph = graph_of(language=(1,))
    plan = only(in_turn(graph, steps_of(graph)), 1, {"forward", "send", "backward", "receive"})
    programs: Any = {FIRST: Slow("language.0-1"), LAST: Ends(None)}
    record = Record()
    seconds = executor_of(graph, programs, 1, Line(clock=clock)).run(plan, separate(1), record)
    assert [moment.action for moment in record.moments] == list(plan.actors[0].actions)
    assert all(one.ended <= other.began for one, other in itertools.pairwise(record.moments))

    def spent(action: Action) -> tuple[float, float]:
        found = [moment for moment in record.moments if moment.action == action]
        (moment,) = found
        return moment.ready - moment.began, moment.ended - moment.ready

    def forward(stage: StageId, microbatch: int) -> Action:
        return Action(kind="forward", module=stage.module, stage=stage.stage, microbatches=(microbatch,))

    assert spent(forward(FIRST, 0)) == (5, 3)
    assert spent(forward(FIRST, 1)) == (0, 3)  # no rows, no message
    assert spent(forward(LAST, 0)) == (0, 0)  # from this rank itself
    assert record.seconds_by_module == {"language": 3 * len(ROWS)}
    assert seconds == {"language": (3 + 5) * len(ROWS) - 5}
    sent = [moment for moment in record.moments if moment.action.kind == "send"]
    assert all(moment.ready == moment.ended for moment in sent)
    assert record.began == 0
    assert record.ended == clock.now


@attrs.frozen
class RecordedProgress:
    """Records what an executor reports."""

    reports: list[str] = attrs.field(factory=list)

    def begin(self, action: Action | None) -> None:
        """Keep it."""
        self.reports.append("end" if action is None else f"{action.kind} {action.microbatches}")

    def wait(self, edge: str, peer: int) -> None:
        """Keep it."""
        self.reports.append(f"waits for {peer} on {edge}")

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Keep it."""
        self.reports.append("goes on" if is_over() else "left to the device")


def test_schedule_executor_reports_what_it_does_and_whom_it_waits_for() -> None:
    """Rows are awaited where a pass needs them, and what was sent must have left before the end."""
    graph = graph_of(language=(1,))
    plan = only(in_turn(graph, steps_of(graph, count=1)), 1, {"forward", "send", "backward", "receive"})
    programs: Any = {FIRST: Ends("language.0-1", (2,)), LAST: Ends(None, (2,))}
    reports = RecordedProgress()
    executor_of(graph, programs, 1, Line(), reports).run(plan, separate(1, (2,)))
    waits = ["waits for 0 on vision->language", "goes on"]
    begun = [one for one in reports.reports if one not in waits]
    assert begun == [*(f"{action.kind} (0,)" for action in plan.actors[0].actions), "end"]
    first = reports.reports.index("forward (0,)")
    assert reports.reports[first + 1 : first + 3] == waits
    assert reports.reports[-3:] == [*waits, "end"]
