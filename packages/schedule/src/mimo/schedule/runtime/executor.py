"""The executor: does one rank's actions of a plan, in order; it alone handles autograd, buffers and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from mimo.schedule.plan import Action, Plan, PlanPhase
from mimo.schedule.routes import Route
from mimo.schedule.runtime.boundary import Boundary, Pending
from mimo.schedule.runtime.program import StageProgram
from mimo.schedule.runtime.progress import NullProgress, Progress
from mimo.schedule.runtime.record import Record
from mimo.schedule.runtime.saved import SavedPass, joined, split
from mimo.schedule.runtime.timer import Reading
from mimo.topology import Edge, ModuleGraph, StageId

RouteOf = Callable[[str, int], Route]
_Now: TypeAlias = Callable[[], Reading]
_MessageKey = tuple[str, int]
"""By edge and microbatch."""
_PassKey = tuple[int, tuple[int, ...]]
"""By number of the stage here, and microbatches."""
_ACCUMULATING = frozenset({"backward", "weight-gradient"})
_MOST_PLANS = 16
"""How many phases of plans stay looked up: a job has a plan for each number of microbatches."""


@attrs.frozen(kw_only=True, eq=False)
class _Stage:
    """One of this rank's stages: what does not change from step to step."""

    number: int
    program: StageProgram
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    runs_backward: bool
    trains: bool


@attrs.frozen(kw_only=True, eq=False)
class _ResolvedAction:
    """An action of a plan, with all that does it.

    Args:
        action: of the plan.
        do: does it, and returns ``now()`` of when all that it waits for is there; None where it waits for none.
        stage: that acts.
        done: the pass that it is of.
        boundary: of a message's edge.
        is_last: whether nothing behind it in the plan adds to the stage's gradients.
    """

    action: Action
    do: Callable[[_StepRun, _ResolvedAction, _Now], Reading]
    stage: _Stage
    done: _PassKey
    boundary: Boundary | None
    is_last: bool


class Executor:
    """Runs plans over one graph on one rank. It saves the rows that a step makes for the next one.

    Args:
        graph: the graph for which the plans were made.
        rank: this rank.
        programs: what each of this rank's stages does.
        boundaries: by edge name, for the edges that touch this rank.
        progress: receives what is done.
    """

    def __init__(
        self,
        graph: ModuleGraph,
        *,
        rank: int,
        programs: Mapping[StageId, StageProgram],
        boundaries: Mapping[str, Boundary],
        progress: Progress | None = None,
    ) -> None:
        self._rank = rank
        self._progress = progress or NullProgress()
        self._made_ahead: dict[_MessageKey, Tensor] = {}
        self._boundaries = boundaries
        self._sources = {edge.name: edge.source for edge in graph.edges}
        self._stages = {
            stage: _Stage(
                number=number,
                program=program,
                inputs=graph.inputs(stage),
                outputs=graph.outputs(stage),
                runs_backward=graph.runs_backward(stage),
                trains=graph.by_name[stage.module].trains[stage.stage],
            )
            for number, (stage, program) in enumerate(programs.items())
        }
        self._known: dict[tuple[int, PlanPhase], tuple[Plan, tuple[_ResolvedAction, ...]]] = {}
        """By the plan's identity, which holds as long as the plan is held."""

    def run(
        self, plan: Plan, route: RouteOf, record: Record | None = None, *, phase: PlanPhase = "both"
    ) -> Mapping[str, float]:
        """Do this rank's actions of one step.

        Where modules prefetch, ``phase`` is "next" before the first step, with that one as the next, and "this" in the
        last. "both" and "this" use up what was made for them; "next" begins anew.

        Args:
            plan: made for this executor's graph.
            route: this rank's route for an edge and a microbatch; the next step's count on from this one's.
            record: receives when each action was done.
            phase: which part of the plan is done.

        Returns:
            Seconds spent in each module's computations, waiting for their inputs included.
        """
        began = time.perf_counter()
        step = _StepRun(route, made_before={} if phase == "next" else self._made_ahead)
        self._made_ahead = {}  # so that rows are freed once they are sent
        seconds: dict[str, float] = {}
        for task in self._tasks(plan, phase):
            action = task.action
            self._progress.begin(action)
            turn = time.perf_counter()
            if record is None:
                task.do(step, task, _no_time)
            else:
                begun = record.timer.now()
                ready = task.do(step, task, record.timer.now)
                record.add(action, began=begun, ready=begun if ready is None else ready, ended=record.timer.now())
            if task.boundary is None and action.kind != "reduce":
                seconds[action.module] = seconds.get(action.module, 0.0) + time.perf_counter() - turn
        self._made_ahead = step.end(plan.microbatches)
        for boundary in self._boundaries.values():
            boundary.flush()
        self._progress.begin(None)
        if record is not None:
            record.began, record.ended = began, time.perf_counter()
        return seconds

    def _tasks(self, plan: Plan, phase: PlanPhase) -> tuple[_ResolvedAction, ...]:
        """Return what this rank does in a phase of a plan, looked up when it runs for the first time."""
        key = (id(plan), phase)
        if key not in self._known:
            if len(self._known) == _MOST_PLANS:
                self._known.clear()
            actions = plan.phase(phase).actions_of(self._rank)
            self._known[key] = (plan, tuple(self._resolved(actions)))
        return self._known[key][1]

    def _resolved(self, actions: tuple[Action, ...]) -> Iterator[_ResolvedAction]:
        lasts = {action.stage_id: place for place, action in enumerate(actions) if action.kind in _ACCUMULATING}
        for place, action in enumerate(actions):
            stage = self._stages[action.stage_id]
            is_message = action.kind in ("send", "receive")
            yield _ResolvedAction(
                action=action,
                do=_MESSAGES[action.kind, action.stage_id == self._sources[action.edge or ""]]
                if is_message
                else _COMPUTATIONS[action.kind],
                stage=stage,
                done=(stage.number, action.microbatches),
                boundary=self._boundaries[action.edge or ""] if is_message else None,
                is_last=lasts.get(action.stage_id) == place,
            )


def _no_time() -> None:
    """Return no reading."""


class _StepRun:
    """One run of a plan: what is on its way, and which passes wait for their backward."""

    def __init__(self, route: RouteOf, *, made_before: dict[_MessageKey, Tensor]) -> None:
        self._route = route
        self._arriving: dict[_MessageKey, Pending] = {}
        self._arriving_gradients: dict[_MessageKey, Pending] = {}
        self._leaving = made_before
        self._leaving_gradients: dict[_MessageKey, Tensor] = {}
        self._saved: dict[_PassKey, SavedPass] = {}
        self._deferred: dict[_PassKey, Callable[[], None]] = {}

    def forward(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Wait for the rows of a pass, and run it."""
        stage, microbatches = task.stage, task.action.microbatches
        inputs = {
            edge.name: joined([self._arriving.pop((edge.name, microbatch)).wait() for microbatch in microbatches])
            for edge in stage.inputs
        }
        ready, saved = now(), SavedPass()
        with torch.set_grad_enabled(stage.runs_backward), stage.program.on_compute("forward"):
            for edge in stage.inputs:
                if edge.gradient:
                    inputs[edge.name] = saved.enter(edge.name, inputs[edge.name])
            outputs = stage.program.forward(microbatches, inputs)
        if stage.runs_backward:
            saved.leave(outputs)
            self._saved[task.done] = saved
        for edge in stage.outputs:
            counts = [self._route(edge.name, microbatch).held for microbatch in microbatches]
            for microbatch, rows in zip(microbatches, split(outputs[edge.name].detach(), counts), strict=True):
                self._leaving[edge.name, microbatch] = rows
        return ready

    def backward(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Wait for the gradients of what a pass gave, and run it backward."""
        gradients = self._gradients(task)
        ready = now()
        with self._accumulation(task, None):
            self._run_backward(task, gradients)
        return ready

    def input_gradient(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Wait for the gradients of what a pass gave, and run it backward with weight gradients deferred."""
        gradients = self._gradients(task)
        ready = now()
        if task.stage.trains:
            with task.stage.program.defer_weight_grads() as self._deferred[task.done]:
                self._run_backward(task, gradients)
        else:
            self._run_backward(task, gradients)
        return ready

    def weight_gradient(self, task: _ResolvedAction, _now: _Now) -> Reading:
        """Compute what has been deferred."""
        if task.stage.trains:
            deferred = self._deferred.pop(task.done)
            with self._accumulation(task, deferred):
                deferred()
        return None

    def reduce(self, task: _ResolvedAction, _now: _Now) -> Reading:
        """Sum gradients over the ranks of a stage, or of a parameter that two stages share."""
        program = task.stage.program
        (program.reduce_tied if task.action.edge else program.reduce_gradients)()
        return None

    def send(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Start sending rows."""
        for boundary, route, key in self._messages(task):
            boundary.send(route, key[1], self._leaving.pop(key))
        return now()

    def receive(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Start receiving rows."""
        for boundary, route, key in self._messages(task):
            self._arriving[key] = boundary.receive(route, key[1])
        return now()

    def send_gradient(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Start sending gradients back."""
        for boundary, route, key in self._messages(task):
            boundary.send_gradient(route, key[1], self._leaving_gradients.pop(key))
        return now()

    def receive_gradient(self, task: _ResolvedAction, now: _Now) -> Reading:
        """Start receiving gradients."""
        for boundary, route, key in self._messages(task):
            self._arriving_gradients[key] = boundary.receive_gradient(route, key[1])
        return now()

    def end(self, microbatches: int) -> dict[_MessageKey, Tensor]:
        """Return what was made for the next step, by its own microbatches, of which this step had as many as given.

        That nothing else is left over is asserted: the plan was proved to use all that it makes.
        """
        ahead = {
            (edge, microbatch - microbatches): rows
            for (edge, microbatch), rows in self._leaving.items()
            if microbatch >= microbatches
        }
        self._leaving = {key: rows for key, rows in self._leaving.items() if key[1] < microbatches}
        assert not self._saved, f"passes without a backward: {list(self._saved)}"
        assert not self._deferred, f"weight gradients deferred and never computed: {list(self._deferred)}"
        rest = (self._arriving, self._arriving_gradients, self._leaving, self._leaving_gradients)
        assert not any(rest), [list(messages) for messages in rest]
        return ahead

    def _messages(self, task: _ResolvedAction) -> Iterator[tuple[Boundary, Route, _MessageKey]]:
        edge, boundary = task.action.edge, task.boundary
        assert edge is not None
        assert boundary is not None
        for microbatch in task.action.microbatches:
            yield boundary, self._route(edge, microbatch), (edge, microbatch)

    def _accumulation(self, task: _ResolvedAction, deferred: Callable[[], None] | None) -> AbstractContextManager[None]:
        if not task.stage.trains:
            return nullcontext()
        return task.stage.program.on_grad_accumulation(deferred, last=task.is_last)

    def _gradients(self, task: _ResolvedAction) -> dict[str, Tensor]:
        """Wait for the gradients of what a pass gave."""
        return {
            edge.name: joined(
                [
                    self._arriving_gradients.pop((edge.name, microbatch)).wait()
                    for microbatch in task.action.microbatches
                ]
            )
            for edge in task.stage.outputs
            if edge.gradient
        }

    def _run_backward(self, task: _ResolvedAction, gradients: Mapping[str, Tensor]) -> None:
        stage, microbatches, kept = task.stage, task.action.microbatches, self._saved.pop(task.done)
        with stage.program.on_compute("backward"):
            kept.backward(gradients)
        for edge in stage.inputs:
            if edge.gradient:
                counts = [self._route(edge.name, microbatch).wanted for microbatch in microbatches]
                for microbatch, rows in zip(microbatches, split(kept.gradient(edge.name), counts), strict=True):
                    self._leaving_gradients[edge.name, microbatch] = rows


_COMPUTATIONS: Mapping[str, Callable[[_StepRun, _ResolvedAction, _Now], Reading]] = {
    "forward": _StepRun.forward,
    "backward": _StepRun.backward,
    "input-gradient": _StepRun.input_gradient,
    "weight-gradient": _StepRun.weight_gradient,
    "reduce": _StepRun.reduce,
}
_MESSAGES: Mapping[tuple[str, bool], Callable[[_StepRun, _ResolvedAction, _Now], Reading]] = {
    ("send", True): _StepRun.send,
    ("receive", False): _StepRun.receive,
    ("send", False): _StepRun.send_gradient,
    ("receive", True): _StepRun.receive_gradient,
}
"""By kind, and whether the stage that acts is the source of the edge."""
