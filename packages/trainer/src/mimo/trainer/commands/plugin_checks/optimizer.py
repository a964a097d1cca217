"""What can be checked of an optimizer plugin in one process: a few steps of a small module, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mimo.model.testing import Verdict
from mimo.optimizer import LearningRate, ModuleParameters, OptimizerSpec
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo.trainer.commands.plugin_checks.kinds import look

_NAME = "module"
_STEPS = 3


def check_optimizer(spec: OptimizerSpec, config: Any) -> Iterator[Verdict]:
    """Yield verdicts on an optimizer; this process must be in no group."""
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield look("steps", _steps, spec, config)
            yield look("empty", _leaves_alone, spec, config)
            yield look("state", _has_state, spec, config)
            yield look("save and load", _resumes, spec, config)
        finally:
            dist.destroy_process_group()


class _TrialRun:
    """A module of one layer and its optimizer: a matrix and a bias."""

    def __init__(self, spec: OptimizerSpec, config: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self._model = nn.Linear(6, 3)
        grid = Grid(name=_NAME, ranks=(0,))
        module = Module(grid=grid, trains=(True,), shard_lanes=spec.shard_lanes(config))
        meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=0, device_type="cpu")
        named = {f"{_NAME}.{name}": parameter for name, parameter in self._model.named_parameters()}
        part = ModuleParameters(grid=grid, rank=0, parameters=named, modules=(self._model,))
        rate = LearningRate(lr=1e-2)
        built = ModuleOptimizer.build({0: part}, spec=spec, config=config, learning_rate=rate, meshes=meshes)
        self.optimizer = MimoOptimizer(
            [built], names=[_NAME], learning_rate=rate, clip=1.0, meshes=meshes, device=torch.device("cpu")
        )

    def step(self, step: int, *, rows: int = 4) -> None:
        """Take a step whose gradients depend on its number alone; without rows it has none."""
        optimizer = self.optimizer
        optimizer.zero_gradients()
        optimizer.gather()
        given = torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))
        with optimizer.on_compute(_NAME, 0, "forward"):
            loss = self._model(given).square().sum()
        with optimizer.on_compute(_NAME, 0, "backward"), optimizer.on_grad_accumulation(_NAME, 0, None, last=True):
            if rows:
                loss.backward()
        optimizer.reduce(_NAME, 0)
        optimizer.step(step, LocalStats(loss=loss.item(), label_weight=4, rows={_NAME: rows}))

    @property
    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights."""
        return {name: weight.detach().clone() for name, weight in self.optimizer.weights()[_NAME].items()}


def _steps(spec: OptimizerSpec, config: Any) -> None:
    """Every weight moves, and stays finite."""
    run = _TrialRun(spec, config)
    before = run.weights
    for step in range(_STEPS):
        run.step(step)
    after = run.weights
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still, f"after {_STEPS} steps these are as they were: {', '.join(still)}"
    wild = [name for name, weight in after.items() if not bool(torch.isfinite(weight).all())]
    assert not wild, f"after {_STEPS} steps these aren't finite: {', '.join(wild)}"


def _leaves_alone(spec: OptimizerSpec, config: Any) -> None:
    """A step in which its module saw no rows leaves the weights as they are."""
    run = _TrialRun(spec, config)
    run.step(1)
    before = run.weights
    run.step(2, rows=0)
    moved = [name for name, weight in run.weights.items() if not torch.equal(weight, before[name])]
    assert not moved, f"these moved: {', '.join(moved)}"


def _has_state(spec: OptimizerSpec, config: Any) -> None:
    """All state is there before the first step, so that a checkpoint can fill it."""
    run = _TrialRun(spec, config)
    before = set(run.optimizer.modules[_NAME].state())
    run.step(1)
    late = sorted(set(run.optimizer.modules[_NAME].state()) - before)
    assert not late, f"these came with the first step: {', '.join(late)}"


def _resumes(spec: OptimizerSpec, config: Any) -> None:
    """With its state taken back it goes on to the bit as if it had not stopped."""
    straight, resumed = _TrialRun(spec, config), _TrialRun(spec, config)
    for step in range(_STEPS):
        straight.step(step)
    straight.optimizer.synchronize()
    state = {name: _copy(leaf) for name, leaf in straight.optimizer.modules[_NAME].state().items()}
    with torch.no_grad():
        weights = straight.weights
        for name, weight in resumed.optimizer.weights()[_NAME].items():
            weight.copy_(weights[name])
    resumed.optimizer.load({_NAME: state})
    for run in (straight, resumed):
        run.step(_STEPS)
    expected, found = straight.weights, resumed.weights
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"these differ: {', '.join(different)}"


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
