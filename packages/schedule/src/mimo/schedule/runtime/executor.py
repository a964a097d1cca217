"""The executor: does one rank's actions of a plan, in order; it alone handles autograd, buffers and messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

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
_MessageKey = tuple[str, int]
"""By edge and microbatch."""
_PassKey = tuple[StageId, tuple[int, ...]]


@attrs.frozen(kw_only=True)
class _StageWiring:
    """What does not change from step to step."""

    programs: Mapping[StageId, StageProgram]
    boundaries: Mapping[str, Boundary]
    edges: Mapping[str, Edge]
    inputs: Mapping[StageId, tuple[Edge, ...]]
    outputs: Mapping[StageId, tuple[Edge, ...]]
    backward: Mapping[StageId, bool]
    trains: Mapping[StageId, bool]


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
        self._wiring = _StageWiring(
            programs=programs,
            boundaries=boundaries,
            edges={edge.name: edge for edge in graph.edges},
            inputs={stage: graph.inputs(stage) for stage in programs},
            outputs={stage: graph.outputs(stage) for stage in programs},
            backward={stage: graph.runs_backward(stage) for stage in programs},
            trains={stage: graph.by_name[stage.module].trains[stage.stage] for stage in programs},
        )

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
        actions = plan.phase(phase).actions_of(self._rank)
        step = _StepRun(self._wiring, route, actions, made_before={} if phase == "next" else self._made_ahead)
        self._made_ahead = {}  # so that rows are freed once they are sent
        seconds: dict[str, float] = {}
        for action in actions:
            self._progress.begin(action)
            turn = time.perf_counter()
            if record is None:
                step.do(action)
            else:
                begun = record.timer.now()
                ready = step.do(action, record.timer.now)
                record.add(action, began=begun, ready=begun if ready is None else ready, ended=record.timer.now())
            if action.kind not in ("send", "receive", "reduce"):
                seconds[action.module] = seconds.get(action.module, 0.0) + time.perf_counter() - turn
        self._made_ahead = step.end(plan.microbatches)
        for boundary in self._wiring.boundaries.values():
            boundary.flush()
        self._progress.begin(None)
        if record is not None:
            record.began, record.ended = began, time.perf_counter()
        return seconds


class _StepRun:
    """One run of a plan: what is on its way, and which passes wait for their backward."""

    def __init__(
        self, wiring: _StageWiring, route: RouteOf, actions: Iterable[Action], *, made_before: dict[_MessageKey, Tensor]
    ) -> None:
        self._wiring = wiring
        self._route = route
        self._to_add = Counter(action.stage_id for action in actions if action.kind in ("backward", "weight-gradient"))
        self._arriving: dict[_MessageKey, Pending] = {}
        self._arriving_gradients: dict[_MessageKey, Pending] = {}
        self._leaving = made_before
        self._leaving_gradients: dict[_MessageKey, Tensor] = {}
        self._saved: dict[_PassKey, SavedPass] = {}
        self._deferred: dict[_PassKey, Callable[[], None]] = {}

    def do(self, action: Action, now: Callable[[], Reading] = lambda: None) -> Reading:
        """Do one action, and return ``now()`` of when all that it waits for is there; None where it waits for none."""
        ready, program, done = None, self._wiring.programs[action.stage_id], (action.stage_id, action.microbatches)
        match action.kind:
            case "forward":
                inputs = self._inputs(*done)
                ready = now()
                self._forward(*done, inputs)
            case "backward":
                gradients = self._gradients(*done)
                ready = now()
                with self._accumulation(action.stage_id, None):
                    self._backward(*done, gradients)
            case "input-gradient":
                gradients = self._gradients(*done)
                ready = now()
                if self._wiring.trains[action.stage_id]:
                    with program.defer_weight_grads() as self._deferred[done]:
                        self._backward(*done, gradients)
                else:
                    self._backward(*done, gradients)
            case "weight-gradient":
                if self._wiring.trains[action.stage_id]:
                    deferred = self._deferred.pop(done)
                    with self._accumulation(action.stage_id, deferred):
                        deferred()
            case "send" | "receive":
                self._messages(action)
                ready = now()
            case "reduce":
                (program.reduce_tied if action.edge else program.reduce_gradients)()
        return ready

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

    def _accumulation(self, stage: StageId, deferred: Callable[[], None] | None) -> AbstractContextManager[None]:
        if not self._wiring.trains[stage]:
            return nullcontext()
        self._to_add[stage] -= 1
        return self._wiring.programs[stage].on_grad_accumulation(deferred, last=not self._to_add[stage])

    def _messages(self, action: Action) -> None:
        assert action.edge is not None
        edge, boundary = self._wiring.edges[action.edge], self._wiring.boundaries[action.edge]
        for microbatch in action.microbatches:
            route, key = self._route(edge.name, microbatch), (edge.name, microbatch)
            match action.kind, action.stage_id == edge.source:
                case "send", True:
                    boundary.send(route, microbatch, self._leaving.pop(key))
                case "receive", False:
                    self._arriving[key] = boundary.receive(route, microbatch)
                case "send", False:
                    boundary.send_gradient(route, microbatch, self._leaving_gradients.pop(key))
                case "receive", True:
                    self._arriving_gradients[key] = boundary.receive_gradient(route, microbatch)

    def _inputs(self, stage: StageId, microbatches: tuple[int, ...]) -> dict[str, Tensor]:
        """Wait for the rows of a pass."""
        return {
            edge.name: joined([self._arriving.pop((edge.name, microbatch)).wait() for microbatch in microbatches])
            for edge in self._wiring.inputs[stage]
        }

    def _gradients(self, stage: StageId, microbatches: tuple[int, ...]) -> dict[str, Tensor]:
        """Wait for the gradients of what a pass gave."""
        return {
            edge.name: joined(
                [self._arriving_gradients.pop((edge.name, microbatch)).wait() for microbatch in microbatches]
            )
            for edge in self._wiring.outputs[stage]
            if edge.gradient
        }

    def _forward(self, stage: StageId, microbatches: tuple[int, ...], inputs: dict[str, Tensor]) -> None:
        saved, backward = SavedPass(), self._wiring.backward[stage]
        program = self._wiring.programs[stage]
        with torch.set_grad_enabled(backward), program.on_compute("forward"):
            for edge in self._wiring.inputs[stage]:
                if edge.gradient:
                    inputs[edge.name] = saved.enter(edge.name, inputs[edge.name])
            outputs = program.forward(microbatches, inputs)
        if backward:
            saved.leave(outputs)
            self._saved[stage, microbatches] = saved
        for edge in self._wiring.outputs[stage]:
            counts = [self._route(edge.name, microbatch).held for microbatch in microbatches]
            for microbatch, rows in zip(microbatches, split(outputs[edge.name].detach(), counts), strict=True):
                self._leaving[edge.name, microbatch] = rows

    def _backward(self, stage: StageId, microbatches: tuple[int, ...], gradients: Mapping[str, Tensor]) -> None:
        kept = self._saved.pop((stage, microbatches))
        with self._wiring.programs[stage].on_compute("backward"):
            kept.backward(gradients)
        for edge in self._wiring.inputs[stage]:
            if edge.gradient:
                counts = [self._route(edge.name, microbatch).wanted for microbatch in microbatches]
                for microbatch, rows in zip(microbatches, split(kept.gradient(edge.name), counts), strict=True):
                    self._leaving_gradients[edge.name, microbatch] = rows
