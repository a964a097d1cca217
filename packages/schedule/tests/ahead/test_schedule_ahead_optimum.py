"""The ``ahead`` schedule beside the shortest possible step, which an exact solver finds for small cases.

The solver's model shares nothing with the schedule: it is derived here from graph and costs. Left out of it, because no
step gets shorter by them, are backwards that stay whole (one in parts may do the second right behind the first, keeps
no more and sends sooner) and microbatches that overtake each other: where they cost the same, giving the k-th that a
stage does the k-th number keeps every arrow, and a last, smaller pass has to come last as plans have it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import pytest

from mimo.schedule import Costs, Link, Seconds, StageCost, Timeline, check, peak_activations, simulate
from mimo.schedule.ahead.budget import smallest_budget
from mimo.schedule.ahead.plugin import Ahead, generate
from mimo.schedule.ahead.task_builder import tasks_of
from mimo.schedule.testing import emulate
from mimo.topology import Edge, Grid, Module, ModuleGraph, StageId

if TYPE_CHECKING:
    from ortools.sat.python import cp_model
else:
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="the solver is in the dependency group test")

EFFORT = 30
"""Of the solver at most, in its deterministic units of about a second; no case here needs one. By one worker it is the
same on every machine, and sooner done than by two."""
ALLOWED = 1.05
ENCODERS, CASES = 56, 72
"""Seeds below the first have encoders alone."""
TASKS = 72
"""That a case may have: with more the solver rarely ends. Cases drawn larger get fewer microbatches."""


@attrs.frozen(kw_only=True)
class _Case:
    graph: ModuleGraph
    microbatches: int
    costs: Costs
    budget: int


def _draw_module(choice: random.Random, name: str, ranks: tuple[int, ...]) -> Module:
    pp = choice.choice([size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0])
    if name == "language" and choice.random() < 0.8:
        pp = len(ranks)
    rest = len(ranks) // pp
    tp = choice.choice([size for size in range(1, rest + 1) if rest % size == 0])
    chunks = choice.choice([1, 1, 1, 2]) if pp <= 2 else 1
    trains = [[True] * pp * chunks, [False] * pp * chunks, [False] * (pp * chunks - 1) + [True]]
    return Module(
        grid=Grid(name=name, ranks=ranks, pp=pp, tp=tp, dp=rest // tp),
        trains=tuple(choice.choice([trains[0], *trains])),
        chunks=chunks,
        placement=choice.choice(["loop", "v"]),
        batch_factor=1 if name == "language" else choice.choice([1, 1, 2]),
        feeds="last" if name == "teacher" else "first",
    )


def _draw_costs(choice: random.Random, graph: ModuleGraph) -> Costs:
    stages = {}
    for stage in graph.stages:
        kept, again = choice.randint(1, 6), choice.choice([0, 0, choice.randint(1, 3)])
        stages[stage] = StageCost(
            forward=Seconds(each=choice.randint(1, 6)),
            input_gradient=Seconds(each=choice.randint(1, 6)),
            weight_gradient=Seconds(each=choice.randint(1, 6)),
            recompute=Seconds(each=choice.randint(1, 3) if again else 0),
            activations=kept,
            recomputed=again,
            weight_inputs=choice.randint(0, kept),
        )
    link = Link(latency=choice.choice([0, 0, 1]))
    return Costs(stages=stages, message_bytes={edge.name: 1 for edge in graph.edges}, link=link).trained(graph)


def _draw(seed: int) -> _Case:
    """Draw modules around a language model, on its ranks, on others or on any; a budget tight, loose or none.

    They are one or two encoders, or an encoder or a teacher, which feeds the last stage, and what the model feeds.
    """
    choice = random.Random(f"ahead {seed}")
    world = choice.randint(2, 4)
    language = tuple(sorted(choice.sample(range(world), choice.randint(1, world))))
    others = tuple(rank for rank in range(world) if rank not in language)
    names = ["vision", "audio"][: choice.randint(1, 2)]
    if seed >= ENCODERS:
        names = [choice.choice(["vision", "teacher"]), "drawer"]
    modules = []
    for name in names:
        anywhere = tuple(sorted(choice.sample(range(world), choice.randint(1, world))))
        modules.append(_draw_module(choice, name, choice.choice([language, others or language, anywhere])))
    modules.append(_draw_module(choice, "language", language))
    arrows = ((name, "language") if name != "drawer" else ("language", name) for name in names)
    graph = ModuleGraph(modules=tuple(modules), arrows=tuple(arrows))
    microbatches, costs = choice.randint(2, 6), _draw_costs(choice, graph)
    while microbatches > 2 and len(tasks_of(graph, microbatches, costs).tasks) > TASKS:
        microbatches -= 1
    low = smallest_budget(tasks_of(graph, microbatches, costs))
    budget = choice.choice([0, low, low + choice.randint(1, 5), low * 3 // 2, low * 2])
    return _Case(graph=graph, microbatches=microbatches, costs=costs, budget=budget)


class _Model:
    """All steps of a case that end by ``horizon``, for the solver."""

    def __init__(self, case: _Case, horizon: int) -> None:
        self.case, self.horizon = case, horizon
        self.model = cp_model.CpModel()
        self.starts: dict[tuple[str, StageId, int, int], cp_model.IntVar] = {}
        self.ends: dict[tuple[str, StageId, int, int], cp_model.LinearExpr] = {}
        self.busy: dict[int, list[cp_model.IntervalVar]] = {number: [] for number in range(len(case.graph.actors))}
        for stage in case.graph.stages:
            self._add_stage(stage)
        for stage in case.graph.stages:
            self._order(stage)
        for number, intervals in self.busy.items():
            self.model.add_no_overlap(intervals)
            if case.budget:
                spans, bytes_ = zip(*self._kept(number), strict=True)
                self.model.add_cumulative(spans, bytes_, case.budget)

    def _passes(self, stage: StageId) -> tuple[tuple[int, ...], ...]:
        return self.case.graph.by_name[stage.module].passes(self.case.microbatches)

    def _holders(self, stage: StageId) -> list[int]:
        return [number for number, actor in enumerate(self.case.graph.actors) if stage in actor.stages]

    def _circle(self, stage: StageId, actor: int) -> set[int]:
        """Return the actors that share a group of ``stage`` with an actor, or with one that does."""
        graph = self.case.graph
        ranks, size = graph.stage_ranks(stage), graph.by_name[stage.module].meeting_size
        groups = [set(ranks[first : first + size]) for first in range(0, len(ranks), size)]
        circle = {actor}
        while True:
            met = {rank for group in groups for one in circle if group & {*graph.actors[one].ranks} for rank in group}
            wider = {number for number, other in enumerate(graph.actors) if met & {*other.ranks}}
            if wider <= circle:
                return circle
            circle |= wider

    def _kinds(self, stage: StageId) -> list[str]:
        backward = self.case.graph.runs_backward(stage)
        trains = self.case.graph.by_name[stage.module].trains[stage.stage]
        return ["forward", *["input-gradient"] * backward, *["weight-gradient"] * (backward and trains)]

    def _add_stage(self, stage: StageId) -> None:
        for kind in self._kinds(stage):
            for number, served in enumerate(self._passes(stage)):
                seconds = int(self.case.costs.stages[stage].seconds(kind, len(served)))  # type: ignore[arg-type]  # kinds are texts here
                for actor in self._holders(stage):
                    key = (kind, stage, number, actor)
                    circle = {actor} if kind == "weight-gradient" else self._circle(stage, actor)
                    if min(circle) < actor:  # one start for all that meet
                        self.starts[key] = self.starts[kind, stage, number, min(circle)]
                    else:
                        self.starts[key] = self.model.new_int_var(0, self.horizon - seconds, "")
                    self.ends[key] = self.starts[key] + seconds
                    self.busy[actor].append(self.model.new_fixed_size_interval_var(self.starts[key], seconds, ""))

    def _order(self, stage: StageId) -> None:
        for kind in self._kinds(stage):
            for number, served in enumerate(self._passes(stage)):
                for actor in self._holders(stage):
                    start = self.starts[kind, stage, number, actor]
                    if number:
                        self.model.add(start >= self.ends[kind, stage, number - 1, actor])
                    before = {"input-gradient": "forward", "weight-gradient": "input-gradient"}.get(kind)
                    if before:
                        self.model.add(start >= self.ends[before, stage, number, actor])
                    for sender, edge in self._senders(kind, stage):
                        self._arrive(start, served, kind, sender, edge)

    def _senders(self, kind: str, stage: StageId) -> Iterator[tuple[StageId, Edge]]:
        if kind == "forward":
            yield from ((edge.source, edge) for edge in self.case.graph.inputs(stage))
        if kind == "input-gradient":
            yield from ((edge.target, edge) for edge in self.case.graph.outputs(stage) if edge.gradient)

    def _arrive(self, start: cp_model.IntVar, served: tuple[int, ...], kind: str, sender: StageId, edge: Edge) -> None:
        """Hold that a start waits for its messages, which follow each other on their way."""
        each = int(self.case.costs.message(self.case.graph, edge))
        for number, sent in enumerate(self._passes(sender)):
            if set(sent) & set(served):
                late = each * sum(microbatch <= served[-1] for microbatch in sent)
                for actor in self._holders(sender):
                    self.model.add(start >= self.ends[kind, sender, number, actor] + late)

    def _kept(self, actor: int) -> Iterator[tuple[cp_model.IntervalVar, int]]:
        """Yield what an actor keeps, and from when to when."""
        for stage in self.case.graph.actors[actor].stages:
            cost, kinds = self.case.costs.stages[stage], self._kinds(stage)
            for number, served in enumerate(self._passes(stage)):
                begins = {kind: self.starts[kind, stage, number, actor] for kind in kinds}
                ends = {kind: self.ends[kind, stage, number, actor] for kind in kinds}
                gradient = "input-gradient" if "input-gradient" in kinds else "forward"
                yield self._span(begins["forward"], ends[gradient]), cost.activations * len(served)
                if gradient in begins and gradient != "forward":
                    yield self._span(begins[gradient], ends[gradient]), cost.recomputed * len(served)
                if "weight-gradient" in kinds:
                    weights = cost.weight_inputs * len(served)
                    yield self._span(ends[gradient], ends["weight-gradient"]), weights

    def _span(self, start: cp_model.LinearExprT, end: cp_model.LinearExprT) -> cp_model.IntervalVar:
        return self.model.new_interval_var(start, self.model.new_int_var(0, self.horizon, ""), end, "")

    def hint(self, timeline: Timeline) -> None:
        """Give the solver a step to begin from."""
        actors = {actor.ranks: number for number, actor in enumerate(self.case.graph.actors)}
        for bar in timeline.bars:
            action, actor = bar.action, actors[bar.ranks]
            if action.kind == "reduce":
                continue
            number = [served[0] for served in self._passes(action.stage_id)].index(action.microbatches[0])
            kind = "input-gradient" if action.kind == "backward" else action.kind
            key = (kind, action.stage_id, number, actor)
            if actor == min(self._circle(action.stage_id, actor)) or kind == "weight-gradient":
                self.model.add_hint(self.starts[key], int(bar.start))
            second = ("weight-gradient", *key[1:])
            if action.kind == "backward" and second in self.starts:
                cost = self.case.costs.stages[action.stage_id]
                last = bar.finish - cost.seconds("weight-gradient", len(action.microbatches))
                self.model.add_hint(self.starts[second], int(last))

    def solve(self) -> str:
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = EFFORT
        solver.parameters.num_workers = 1
        return solver.status_name(solver.solve(self.model))


@pytest.mark.parametrize(
    "seed", [seed if seed % 6 == 0 else pytest.param(seed, marks=pytest.mark.soak) for seed in range(CASES)]
)
def test_ahead_is_within_a_twentieth_of_the_shortest_step(seed: int) -> None:
    """Its simulated step takes at most 1.05 times the optimum under the same budget, and keeps to that budget."""
    case = _draw(seed)
    plan = generate(case.graph, case.microbatches, Ahead(budget=case.budget), case.costs)
    check(plan, case.graph)
    emulate(plan, case.graph, seed=seed)
    simulated = simulate(plan, case.graph, case.costs)
    seconds = int(simulated.seconds)
    if case.budget:
        assert (
            max(peak.bytes for peak in peak_activations(plan, case.graph, case.costs, unsent=False).values())
            <= case.budget
        )
    own = _Model(case, horizon=seconds)
    own.hint(simulated.timeline)
    assert own.solve() in {"OPTIMAL", "FEASIBLE"}, "the model must allow the step that was made"
    assert _Model(case, horizon=math.ceil(seconds / ALLOWED) - 1).solve() == "INFEASIBLE"


@pytest.mark.parametrize("seed", range(12))
def test_no_budget_below_the_smallest_one_works(seed: int) -> None:
    """What is refused with a smallest budget could not be done within a byte less, in any order of work."""
    case = _draw(seed)
    unit = Seconds(each=1)
    stages = {
        stage: attrs.evolve(cost, forward=unit, input_gradient=unit, weight_gradient=unit, recompute=Seconds())
        for stage, cost in case.costs.stages.items()
    }
    case = attrs.evolve(case, microbatches=2, costs=Costs(stages=stages).trained(case.graph))
    tasks = tasks_of(case.graph, case.microbatches, case.costs)
    low, work = smallest_budget(tasks), int(sum(task.seconds for task in tasks.tasks))
    assert _Model(attrs.evolve(case, budget=low), work).solve() in {"OPTIMAL", "FEASIBLE"}
    assert _Model(attrs.evolve(case, budget=low - 1), work).solve() == "INFEASIBLE"
