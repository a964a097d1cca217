"""The plugin: its settings, and that its optimizers find out who reads their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mimo.hooks import ConfigError, discover
from mimo.optimizer import OPTIMIZERS, LearningRate, ModuleParameters
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer


def test_the_plugin_is_found() -> None:
    """By its name, as an installed one."""
    assert discover(OPTIMIZERS, where="optimizer.plugin")["cpu-offload"] is HYBRID


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            {"fraction": 1.2},
            (
                "optimizer.fraction: expected the share of the optimizer's state that the host holds, from 0 to 1, "
                "or 'auto', got 1.2. 0 leaves all on the device, 1 holds all in host memory."
            ),
        ),
        ({"bucket_bytes": 63}, "optimizer.bucket_bytes: expected 64 bytes or more, got 63."),
        ({"staging_bytes": -1}, "optimizer.staging_bytes: expected 0 bytes or more, got -1."),
        ({"threads": -1}, "optimizer.threads: expected 0 threads or more, got -1."),
        ({"threads": 5000}, "optimizer.threads: expected at most 4096 threads, got 5000."),
        ({"betas": (0.9, 1.0)}, "optimizer.betas: expected two numbers from 0 to below 1, got (0.9, 1.0)."),
    ],
)
def test_settings_are_held_to_what_can_be(setting: dict[str, Any], text: str) -> None:
    """Each error has the path of its setting."""
    with pytest.raises(ConfigError) as error:
        CpuOffloadConfig(**setting)
    assert str(error.value) == text


def steps(_rank: int, fraction: float) -> list[bool]:
    """Step two modules with MimoOptimizer, one of which has no rows in the second step; return what was changed."""
    graph = ModuleGraph(
        modules=tuple(Module(grid=Grid(name=name, ranks=(0,)), trains=(True,)) for name in ("vision", "language")),
        arrows=(("vision", "language"),),
    )
    meshes = Meshes(graph, rank=0, device_type="cpu")
    layers = {name: nn.Linear(20, 30) for name in ("vision", "language")}
    modules = []
    for name, layer in layers.items():
        part = ModuleParameters(
            grid=graph.by_name[name].grid,
            rank=0,
            parameters={f"{name}.{path}": parameter for path, parameter in layer.named_parameters()},
            modules=(layer,),
        )
        modules.append(
            ModuleOptimizer.build(
                {0: part},
                spec=HYBRID,
                config=CpuOffloadConfig(fraction=fraction, bucket_bytes=64),
                learning_rate=LearningRate(lr=0.1),
                meshes=meshes,
            )
        )
    optimizer = MimoOptimizer(
        modules,
        names=["vision", "language"],
        learning_rate=LearningRate(lr=0.1),
        clip=1.0,
        meshes=meshes,
        device=torch.device("cpu"),
    )
    assert all(isinstance(one.optimizer, HybridDeviceOptimizer) for made in modules for one in made.steppers)
    found = []
    for step, rows in enumerate(({"vision": 1, "language": 1}, {"language": 1}), 1):
        before = _values(optimizer)
        optimizer.zero_gradients()
        for layer in layers.values():
            layer(torch.ones(2, 20)).sum().backward()
        for name in layers:
            optimizer.reduce(name, 0)
        optimizer.step(step, LocalStats(loss=1.0, label_weight=1, rows=rows))
        optimizer.synchronize()
        after = _values(optimizer)
        found += [
            all(not torch.equal(before[key], after[key]) for key in before if key.startswith(name)) for name in layers
        ]
        found += [
            all(torch.equal(before[key], after[key]) for key in before if key.startswith(name)) for name in layers
        ]
    return found


def _values(optimizer: MimoOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of all weights and moments."""
    weights = {name: value for module in optimizer.weights().values() for name, value in module.items()}
    states: dict[str, Any] = dict(optimizer.state())
    moments = {f"{name}.{key}": value for name, tree in states.items() for key, value in tree.items()}
    return {name: value.detach().clone() for name, value in {**weights, **moments}.items()}


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_module_without_rows_is_left_untouched(fraction: float, run_ranks: Callable[..., list[Any]]) -> None:
    """Its weights, moments and counts of steps stay, though a gradient of it has been staged."""
    assert run_ranks(1, steps, fraction) == [[True, True, False, False, False, True, True, False]]
