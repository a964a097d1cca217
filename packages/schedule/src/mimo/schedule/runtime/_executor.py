"""The executor: does one rank's actions of a plan, in order; autograd, buffers and messages are its alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mimo.hooks import PlanError
from mimo.schedule._plan import Action, Plan
from mimo.schedule._routes import Route
from mimo.schedule.runtime._boundary import Boundary, Pending
from mimo.topology import Edge, ModuleGraph, StageId

LOSS = "loss"
"""Port of a stage's output that is a loss: a scalar, whose gradient is 1."""

RouteOf = Callable[[str, int], Route]


class StageProgram(Protocol):
    """What one pipeline stage of one module does; the trainer adapts the model and the optimizer to it."""

    def forward(self, microbatch: int, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a microbatch: rows by the name of the edge on which they came, to rows by edge, and `LOSS`."""

    def reduce_gradients(self) -> None:
        """Sum the stage's gradients over the ranks that share its parameters."""

    def reduce_tied(self) -> None:
        """Add up the gradients of parameters that another stage holds too."""


@attrs.frozen
class _Kept:
    """What the backward of a microbatch needs of its forward."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@attrs.frozen(kw_only=True)
class _Wiring:
    """What does not change from step to step."""

    programs: Mapping[StageId, StageProgram]
    boundaries: Mapping[str, Boundary]
    edges: Mapping[str, Edge]
    inputs: Mapping[StageId, tuple[Edge, ...]]
    outputs: Mapping[StageId, tuple[Edge, ...]]
    backward: Mapping[StageId, bool]


class Executor:
    """Runs plans over one graph on one rank.

    Args:
        graph: the graph for which the plans were made.
        rank: this rank.
        programs: what each of this rank's stages does.
        boundaries: by edge name, for the edges that touch this rank.
    """

    def __init__(
        self,
        graph: ModuleGraph,
        *,
        rank: int,
        programs: Mapping[StageId, StageProgram],
        boundaries: Mapping[str, Boundary],
    ) -> None:
        self._rank = rank
        self._wiring = _Wiring(
            programs=programs,
            boundaries=boundaries,
            edges={edge.name: edge for edge in graph.edges},
            inputs={stage: graph.inputs(stage) for stage in programs},
            outputs={stage: graph.outputs(stage) for stage in programs},
            backward={stage: graph.runs_backward(stage) for stage in programs},
        )

    def run(self, plan: Plan, route: RouteOf) -> Mapping[str, float]:
        """Do this rank's actions of one step.

        Args:
            plan: made for this executor's graph.
            route: this rank's route for an edge and a microbatch.

        Returns:
            Seconds spent in each module's computations, waiting for their inputs included.
        """
        step = _Step(self._wiring, route)
        for action in plan.actions_of(self._rank):
            step.do(action)
        for boundary in self._wiring.boundaries.values():
            boundary.flush()
        return step.seconds


class _Step:
    """One run of a plan: what is on its way, and what waits for its backward."""

    def __init__(self, wiring: _Wiring, route: RouteOf) -> None:
        self._wiring = wiring
        self._route = route
        self._arriving: dict[tuple[str, int], Pending] = {}
        self._arriving_gradients: dict[tuple[str, int], Pending] = {}
        self._leaving: dict[tuple[str, int], Tensor] = {}
        self._leaving_gradients: dict[tuple[str, int], Tensor] = {}
        self._kept: dict[tuple[StageId, int], _Kept] = {}
        self.seconds: dict[str, float] = {}

    def do(self, action: Action) -> None:
        """Do one action."""
        match action.kind:
            case "forward" | "backward":
                start = time.perf_counter()
                for microbatch in action.microbatches:
                    (self._forward if action.kind == "forward" else self._backward)(action.stage_id, microbatch)
                spent = time.perf_counter() - start
                self.seconds[action.module] = self.seconds.get(action.module, 0.0) + spent
            case "send" | "receive":
                assert action.edge is not None
                for microbatch in action.microbatches:
                    self._message(action, self._wiring.edges[action.edge], microbatch)
            case "reduce":
                program = self._wiring.programs[action.stage_id]
                (program.reduce_tied if action.edge else program.reduce_gradients)()
            case "input-gradient" | "weight-gradient":
                raise PlanError(
                    f"plan, {action.module} stage {action.stage}",
                    expected="whole backward actions, as this executor runs them",
                    got=f"{action.kind!r}",
                    fix="Choose a schedule that does not split the backward.",
                )

    def _message(self, action: Action, edge: Edge, microbatch: int) -> None:
        boundary, route = self._wiring.boundaries[edge.name], self._route(edge.name, microbatch)
        key = (edge.name, microbatch)
        match action.kind, action.stage_id == edge.source:
            case "send", True:
                boundary.send(route, microbatch, self._leaving.pop(key))
            case "receive", False:
                self._arriving[key] = boundary.receive(route, microbatch)
            case "send", False:
                boundary.send_gradient(route, microbatch, self._leaving_gradients.pop(key))
            case "receive", True:
                self._arriving_gradients[key] = boundary.receive_gradient(route, microbatch)

    def _forward(self, stage: StageId, microbatch: int) -> None:
        inputs = {}
        for edge in self._wiring.inputs[stage]:
            rows = self._arriving.pop((edge.name, microbatch)).wait()
            inputs[edge.name] = rows.requires_grad_(edge.gradient)
        with torch.set_grad_enabled(self._wiring.backward[stage]):
            outputs = self._wiring.programs[stage].forward(microbatch, inputs)
        for edge in self._wiring.outputs[stage]:
            self._leaving[edge.name, microbatch] = outputs[edge.name].detach()
        if self._wiring.backward[stage]:
            self._kept[stage, microbatch] = _Kept(inputs, outputs)

    def _backward(self, stage: StageId, microbatch: int) -> None:
        kept = self._kept.pop((stage, microbatch))
        roots: list[tuple[Tensor, Tensor | None]] = [
            (kept.outputs[edge.name], self._arriving_gradients.pop((edge.name, microbatch)).wait())
            for edge in self._wiring.outputs[stage]
        ]
        if LOSS in kept.outputs:
            roots.append((kept.outputs[LOSS], None))
        # A microbatch without a trained part in it (an empty lane of a stranger's encoder) has no graph.
        live = [(output, gradient) for output, gradient in roots if output.requires_grad]
        torch.autograd.backward([output for output, _ in live], [gradient for _, gradient in live])
        for edge in self._wiring.inputs[stage]:
            if edge.gradient:
                rows = kept.inputs[edge.name]
                gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
                self._leaving_gradients[edge.name, microbatch] = gradient
