"""Our executor beside `torch.distributed.pipelining` on the same four stages: wall time, and CPU outside of layers.

Each schedule runs the same microbatches through stages of equal weights, once as our plan and once as PyTorch's
schedule of the same name: ``1f1b`` on four ranks, interleaved and the V-shaped zero bubble on two ranks with two
stages each. A step is forward, backward and all messages; gradients are cleared before it. Products are
`torch.nn.Linear` there, and here our `Linear` where a backward is split, which is what puts weight gradients off. Both
take turns in one run, one thread a rank, and before that their gradients are compared. CPU seconds are those of all
threads of all ranks, in a step of small layers, less those of the same forwards and backwards by themselves.
``nox -s bench -- schedule [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import attrs
import torch
import torch.distributed as dist
from _forked import in_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from mimo.model.runtime import Linear, WeightGradQueue
from mimo.schedule import SCHEDULES, Costs, Plan, ScheduleSpec, check, pipeline_route
from mimo.schedule.runtime import LOSS, Boundary, Executor, open_channels
from mimo.topology import Grid, Module, ModuleGraph, StageId
from mimo.trainer.runtime import find_installed, structure

STAGES = 4
MICROBATCHES = 8
BLOCKS = 2
"""Blocks of a stage."""
WARM_UP = 3
STEPS = 3
"""Steps of each turn."""
TOLERANCE = 1e-5
COLUMNS = ("ours", "theirs", "bare")

Step: TypeAlias = Callable[[], None]


@attrs.frozen
class Sizes:
    """Rows of a microbatch, their columns, and the width inside a block."""

    rows: int
    width: int
    middle: int


TIMED, COUNTED = Sizes(256, 256, 1024), Sizes(16, 64, 128)
"""What wall time is taken of, and CPU seconds outside of layers."""


@attrs.frozen(kw_only=True)
class Case:
    """One schedule.

    Args:
        ranks: on which it runs.
        ours: name and keys of our plugin.
        theirs: PyTorch's class.
        split: whether its backwards are split.
    """

    ranks: int
    ours: str
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    theirs: type
    split: bool = False


CASES = {
    "1F1B": Case(ranks=4, ours="1f1b", theirs=Schedule1F1B),
    "Interleaved1F1B": Case(ranks=2, ours="interleaved", theirs=ScheduleInterleaved1F1B),
    "ZBVZeroBubble": Case(ranks=2, ours="zero-bubble", keys={"form": "v"}, theirs=ScheduleZBVZeroBubble, split=True),
}


class Block(nn.Module):
    """A feed-forward block with a residual, of products of either kind."""

    def __init__(self, sizes: Sizes, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.up, self.down = linear(sizes.width, sizes.middle), linear(sizes.middle, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        return cast("Tensor", x + self.down(functional.gelu(self.up(self.norm(x)))))


def make_stage(index: int, sizes: Sizes, linear: Callable[[int, int], nn.Module]) -> nn.Module:
    """Return a stage; its weights follow from its number."""
    torch.manual_seed(index)
    stage = nn.Sequential(*(Block(sizes, nn.Linear) for _ in range(BLOCKS)))
    made = nn.Sequential(*(Block(sizes, linear) for _ in range(BLOCKS)))
    made.load_state_dict(stage.state_dict())
    return made


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a microbatch."""
    return (output - target).square().sum()


@attrs.define(eq=False)
class Program:
    """One of our stages."""

    module: nn.Module
    port: str | None
    data: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    weight_grad_queue: WeightGradQueue = attrs.field(factory=WeightGradQueue)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a microbatch."""
        (microbatch,) = microbatches
        output = self.module(next(iter(inputs.values()), self.data[microbatch]))
        return {LOSS: loss_of(output, self.targets[microbatch])} if self.port is None else {self.port: output}

    def defer_weight_grads(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Put weight gradients off."""
        return self.weight_grad_queue.collect()

    def on_compute(self, _phase: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def on_grad_accumulation(self, *_args: object, **_last: object) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """Nobody shares them."""

    def reduce_tied(self) -> None:
        """Nothing is tied."""


def our_plan(case: Case) -> tuple[ModuleGraph, Plan]:
    """Return our graph and plan of a case."""
    spec: ScheduleSpec = find_installed(SCHEDULES, case.ours, "schedule.plugin")
    config: Any = structure(case.keys, spec.config, "schedule")
    module = Module(
        grid=Grid(name="language", ranks=tuple(range(case.ranks)), pp=case.ranks),
        trains=(True,) * STAGES,
        chunks=STAGES // case.ranks,
        placement=spec.placement(config),
    )
    graph = ModuleGraph(modules=(module,), arrows=())
    plan = spec.generate(graph, MICROBATCHES, config, Costs.even(graph))
    check(plan, graph)
    return graph, plan


def our_step(case: Case, sizes: Sizes, rank: int, data: Tensor, targets: Tensor) -> tuple[Step, dict[int, nn.Module]]:
    """Return what runs a step, and this rank's stages."""
    graph, plan = our_plan(case)
    (module,) = graph.modules
    channels, device = open_channels(graph), torch.device("cpu")
    stages = {
        stage.stage: make_stage(stage.stage, sizes, Linear if case.split else nn.Linear)
        for stage in graph.role(rank).stages
    }
    programs = {}
    for index, stage in stages.items():
        port = next((edge.name for edge in graph.outputs(StageId("language", index))), None)
        program = Program(stage, port, data.chunk(MICROBATCHES), targets.chunk(MICROBATCHES))
        for part in stage.modules():
            if isinstance(part, Linear):
                part.weight_grad_queue = program.weight_grad_queue
        programs[StageId("language", index)] = program
    own = [dist.new_group([other]) for other in range(case.ranks)][rank]
    boundaries = {
        edge.name: Boundary(
            rank=rank,
            width=sizes.width,
            dtype=torch.float32,
            device=device,
            channels=channels[edge.name],
            source_group=own if edge.source in programs else None,
            target_group=own if edge.target in programs else None,
        )
        for edge in graph.edges
        if programs.keys() & {edge.source, edge.target}
    }
    routes = {
        edge.name: pipeline_route(
            module.grid,
            rank=rank,
            source=module.pipeline_rank(edge.source.stage),
            target=module.pipeline_rank(edge.target.stage),
            rows=sizes.rows,
        )
        for edge in graph.edges
        if edge.name in boundaries
    }
    executor = Executor(graph, rank=rank, programs=programs, boundaries=boundaries)

    def run() -> None:
        clear(stages)
        executor.run(plan, lambda edge, _microbatch: routes[edge])

    return run, stages


def their_step(case: Case, sizes: Sizes, rank: int, data: Tensor, targets: Tensor) -> tuple[Step, dict[int, nn.Module]]:
    """Return what runs a step of PyTorch's schedule, and this rank's stages."""
    graph, _ = our_plan(case)
    stages = {stage.stage: make_stage(stage.stage, sizes, nn.Linear) for stage in graph.role(rank).stages}
    wrapped = [PipelineStage(stage, index, STAGES, torch.device("cpu")) for index, stage in stages.items()]
    schedule = case.theirs(
        wrapped[0] if case.ranks == STAGES else wrapped, MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )

    def run() -> None:
        clear(stages)
        losses: list[Tensor] = []
        given = (data,) if 0 in stages else ()
        schedule.step(*given, **({"target": targets, "losses": losses} if STAGES - 1 in stages else {}))

    return run, stages


def clear(stages: Mapping[int, nn.Module]) -> None:
    """Let go of gradients."""
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = None


def difference(ours: Mapping[int, nn.Module], theirs: Mapping[int, nn.Module]) -> float:
    """Return by how much gradients differ at most, over their norm, on any rank."""
    worst = 0.0
    for index in ours:
        for one, other in zip(ours[index].parameters(), theirs[index].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            worst = max(worst, float((one.grad - other.grad).norm() / other.grad.norm()))
    found = torch.tensor([worst])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def bare_step(sizes: Sizes, stages: Mapping[int, nn.Module], data: Tensor, targets: Tensor) -> Step:
    """Return what runs the forwards and backwards of a rank's stages alone, all on rows that are there."""
    rows, wanted = data.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)
    gradient = torch.ones(sizes.rows, sizes.width)

    def run() -> None:
        clear(stages)
        for index, stage in stages.items():
            for microbatch in range(MICROBATCHES):
                x = rows[microbatch].detach().requires_grad_(index > 0)
                output = stage(x)
                if index == STAGES - 1:
                    loss_of(output, wanted[microbatch]).backward()
                else:
                    output.backward(gradient)

    return run


@attrs.frozen
class Turn:
    """Seconds a step of ours, of PyTorch's, and of layers alone."""

    ours: float
    theirs: float
    bare: float

    @property
    def ratio(self) -> float:
        """Time of ours over theirs."""
        return self.ours / self.theirs

    @property
    def ratio_outside(self) -> float:
        """The same less that of layers alone."""
        return (self.ours - self.bare) / (self.theirs - self.bare)


def measure(case: Case, sizes: Sizes, rank: int, rounds: int) -> tuple[float, list[Turn], list[Turn]]:
    """Return how far gradients differ, and of each round seconds of wall time, and of CPUs on all ranks."""
    torch.manual_seed(STAGES)
    data, targets = torch.randn(2, MICROBATCHES * sizes.rows, sizes.width).unbind(0)
    (ours, our_stages), (theirs, their_stages) = (
        make(case, sizes, rank, data, targets) for make in (our_step, their_step)
    )
    bare = bare_step(sizes, their_stages, data, targets)
    for _ in range(WARM_UP):
        ours()
        theirs()
    difference_norm = difference(our_stages, their_stages)
    bare()

    def seconds(run: Step) -> tuple[float, float]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            run()
        own = torch.tensor([time.process_time() - cpu])
        dist.barrier()
        took = time.perf_counter() - start
        dist.all_reduce(own)
        return took / STEPS, float(own) / STEPS

    found = []
    for turn in range(rounds):
        order = (ours, theirs, bare) if turn % 2 else (theirs, ours, bare)
        taken = {run: seconds(run) for run in order}
        found.append([Turn(*pair) for pair in zip(taken[ours], taken[theirs], taken[bare], strict=True)])
    wall, cpu = (list(column) for column in zip(*found, strict=True))
    return difference_norm, wall, cpu


def cases(names: list[str]) -> Iterator[tuple[str, Case]]:
    """Yield the cases of these names, or all."""
    for name, case in CASES.items():
        if not names or name in names:
            yield name, case


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each, of which the median counts")
    parser.add_argument("--case", action="append", default=[], choices=CASES, help="only this schedule; repeatable")
    arguments = parser.parse_args()
    ratios, spread, aims = {}, {}, {}

    def enter(what: str, found: list[float], aim: float) -> None:
        ratios[what], spread[what], aims[what] = statistics.median(found), [min(found), max(found)], ["<=", aim]

    for name, case in cases(arguments.case):
        for sizes in (TIMED, COUNTED):
            difference_norm, wall, cpu = in_ranks(
                partial(measure, case, sizes), world=case.ranks, rounds=arguments.rounds
            )
            if not difference_norm <= TOLERANCE:
                sys.exit(f"{name}: gradients differ by {difference_norm:.1e}")
            if sizes is TIMED:
                what, turns, aim = f"time, {name} / torch", wall, 1.0
                enter(what, [turn.ratio for turn in turns], aim)
            else:
                what, turns, aim = f"CPU outside of layers, {name} / torch", cpu, 0.7
                enter(what, [turn.ratio_outside for turn in turns], aim)
            ours, theirs, bare = (statistics.median(getattr(one, key) for one in turns) * 1e3 for key in COLUMNS)
            print(
                f"{what}, {case.ranks} ranks: {ratios[what]:.3f}; ours {ours:.1f} ms, torch's {theirs:.1f} ms a step, "
                f"layers alone {bare:.1f} ms; gradients differ by {difference_norm:.1e}"
            )
    print(json.dumps({"bench": "schedule", "ratios": ratios, "aims": aims, "runs": arguments.rounds, "spread": spread}))


if __name__ == "__main__":
    main()
