"""Gradients go down while the backward still runs, and what has gone down too early is never stepped with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest.mock import patch

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.optimizer import LearningRate, ModuleParameters, OptimizerSpec
from mimo.optimizer.runtime import FlatSum, LocalStats, MimoOptimizer, ModuleOptimizer, _replicate
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed import DISTRIBUTED, DistributedConfig
from mimo_optimizer_distributed._scatter import Scatter
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig
from mimo_optimizer_hybrid._staging import Staging
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

LAYERS, WIDTH = 6, 16
Shard = Literal["optimizer", "gradients", "full"]
LAID: dict[str, tuple[int, dict[str, Any]]] = {
    "one lane": (1, {}),
    "replicated": (2, {"shard_lanes": 1}),
    "optimizer": (2, {"shard": "optimizer"}),
    "gradients": (2, {"shard": "gradients"}),
    "full": (2, {"shard": "full"}),
}


class Model(nn.Module):
    """Layers, each of which says when the gradient of what it was given is there: its own are then on their way."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._events = events

    def forward(self, rows: Tensor) -> Tensor:
        """Return a loss."""
        for index, layer in enumerate(self.layers):
            if rows.requires_grad:
                rows.register_hook(lambda _, index=index: self._events.append(f"back through {index}"))
            rows = torch.tanh(layer(rows))
        return rows.square().sum()


@attrs.frozen(kw_only=True)
class Setup:
    """A model of one stage on some lanes, with its optimizer."""

    model: Model
    optimizer: MimoOptimizer
    events: list[str] = attrs.field(factory=list)

    def backward(self, rows: Sequence[Tensor]) -> None:
        """Add the gradients of some passes, and sum them over the lanes."""
        self.optimizer.zero_gradients()
        self.optimizer.gather()
        with patch.object(Staging, "stage", self._staged):
            for index, own in enumerate(rows):
                with self.optimizer.on_compute("model", 0, "forward"):
                    loss = self.model(own)
                last = index == len(rows) - 1
                with (
                    self.optimizer.on_grad_accumulation("model", 0, None, last=last),
                    self.optimizer.on_compute("model", 0, "backward"),
                ):
                    self.events.append("backward")
                    loss.backward()
            self.events.append("reduce")
            self.optimizer.reduce("model", 0)

    def step(self, step: int) -> bool:
        """Take the step of these gradients; return whether it was skipped."""
        return self.optimizer.step(step, LocalStats(loss=1.0, label_weight=3, rows={"model": 1})).skipped

    @property
    def values(self) -> list[Tensor]:
        """All weights and moments of this rank."""
        parameters = self.optimizer.weights()["model"].values()
        (stepper,) = self.optimizer.modules["model"].steppers
        states = [value for one in parameters for value in stepper.optimizer.state[one].values()]
        return [_here(value).detach().clone() for value in (*parameters, *states)]

    def _staged(self, gradients: Any) -> None:
        (stepper,) = self.optimizer.modules["model"].steppers
        assert isinstance(stepper.optimizer, HybridDeviceOptimizer)
        staging = stepper.optimizer._host._staging
        _STAGE(staging, gradients)
        names = list(stepper.optimizer._index)
        self.events.extend(f"copied {names[index]}" for index in gradients if index in staging._copied)


_STAGE = Staging.stage


def _here(value: Tensor) -> Tensor:
    return getattr(value, "_local_tensor", value)


def make(rank: int, lanes: int, spec: OptimizerSpec, config: Any) -> Setup:
    """Return one on a rank."""
    grid = Grid(name="model", ranks=range(lanes), dp=lanes)
    module = Module(
        grid=grid,
        trains=(True,),
        gathers=spec.rendezvous(config),
        shard_lanes=spec.shard_lanes(config),
        overlaps=spec.overlaps(config),
    )
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    events: list[str] = []
    model = Model(events)
    parameters = {f"model.{name}": value for name, value in model.named_parameters()}
    part = ModuleParameters(grid=grid, rank=rank, parameters=parameters, modules=(model,))
    rate = LearningRate(lr=0.1)
    built = ModuleOptimizer.build({0: part}, spec=spec, config=config, learning_rate=rate, meshes=meshes)
    optimizer = MimoOptimizer(
        [built], names=["model"], learning_rate=rate, clip=1.0, meshes=meshes, device=torch.device("cpu")
    )
    return Setup(model=model, optimizer=optimizer, events=events)


def rows_of(rank: int, step: int, microbatch: int) -> Tensor:
    """Return what a lane reads."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + microbatch)
    return torch.randn(5, WIDTH, generator=generator, requires_grad=True)


def events_of(rank: int, lanes: int, keys: dict[str, Any], staging_bytes: int) -> list[str]:
    """Return what has happened in a step, whose sums over lanes are waited for where they are only looked at."""

    def is_done(self: Any) -> bool:
        for work in [self._work] if isinstance(self, Scatter) else [one for one, *_ in self._works]:
            work.wait()
        return True

    with (
        patch.object(FlatSum, "is_done", property(is_done)),
        patch.object(Scatter, "is_done", property(is_done)),
        patch.object(_replicate, "MESSAGE_BYTES", 1),
    ):
        config = CpuOffloadConfig(
            fraction=1, bucket_bytes=4 * WIDTH, staging_bytes=staging_bytes, overlap_grad_reduce=True, **keys
        )
        setup = make(rank, lanes, HYBRID, config)
        setup.backward([rows_of(rank, 1, microbatch) for microbatch in range(2)])
    return setup.events


@pytest.mark.parametrize("laid", LAID)
def test_each_layer_is_copied_down_while_the_backward_continues(laid: str, run_ranks: Callable[..., list[Any]]) -> None:
    """In the last pass only, as nothing is final before; while it goes back through the layer but one in front."""
    lanes, keys = LAID[laid]
    for events in run_ranks(lanes, events_of, lanes, keys, 1 << 20):
        first, last = (at for at, event in enumerate(events) if event == "backward")
        assert not [event for event in events[first:last] if event.startswith("copied")]
        for index in range(2, LAYERS):
            for leaf in ("weight", "bias"):
                copied = events.index(f"copied model.layers.{index}.{leaf}")
                assert last < copied < events.index(f"back through {index - 2}", last)
        every = [event for event in events if event.startswith("copied")]
        assert len(every) == len(set(every)) == 2 * LAYERS


@pytest.mark.parametrize("laid", ["one lane", "full"])
def test_with_few_buffers_the_last_layers_are_copied_down(laid: str, run_ranks: Callable[..., list[Any]]) -> None:
    """A backward comes to them first. Of the others the first layer's go down, as a step begins with them."""
    lanes, keys = LAID[laid]
    layer_bytes = 4 * (WIDTH + 1) * WIDTH // lanes
    for events in run_ranks(lanes, events_of, lanes, keys, 2 * layer_bytes):
        copied = [event.removeprefix("copied model.layers.") for event in events if event.startswith("copied")]
        assert {"5.weight", "5.bias"} <= set(copied)
        assert not {one for one in copied if one[0] in "123"}
        assert events.index("copied model.layers.5.weight") < events.index("reduce")


def beside_distributed(rank: int, lanes: int, keys: dict[str, Any], staging_bytes: int) -> list[bool]:
    """Take ten steps with both; return for each whether all is equal, and whether it was skipped."""
    ours = make(
        rank,
        lanes,
        HYBRID,
        CpuOffloadConfig(fraction=0.7, bucket_bytes=64, staging_bytes=staging_bytes, overlap_grad_reduce=True, **keys),
    )
    plain = make(rank, lanes, DISTRIBUTED, DistributedConfig(overlap_grad_reduce=True, **keys))
    found = []
    for step in range(1, 11):
        for setup in (ours, plain):
            rows = [rows_of(rank, step, microbatch).detach() for microbatch in range(2)]
            if step in (3, 7) and rank == 0:
                rows[0][0] = float("inf")
            setup.backward([one.requires_grad_() for one in rows])
            if step in (5, 6):  # as what adds up copies of two stages, and others that change gradients later
                for parameter in setup.optimizer.modules["model"].part.parameters.values():
                    assert parameter.grad is not None
                    _here(parameter.grad).mul_(2)
            if step == 6:
                setup.optimizer.synchronize()
        skipped = ours.step(step)
        assert plain.step(step) == skipped
        found += [skipped, all(map(torch.equal, ours.values, plain.values))]
    return found


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20], ids=["two buffers", "a buffer for each"])
@pytest.mark.parametrize("laid", LAID)
def test_nothing_that_went_down_too_early_is_stepped_with(
    laid: str, staging_bytes: int, run_ranks: Callable[..., list[Any]]
) -> None:
    """Gradients of skipped steps, and those that have changed since: to the bit what nothing was staged of."""
    lanes, keys = LAID[laid]
    expected = [one for step in range(1, 11) for one in (step in (3, 7), True)]
    assert run_ranks(lanes, beside_distributed, lanes, keys, staging_bytes) == [expected] * lanes
