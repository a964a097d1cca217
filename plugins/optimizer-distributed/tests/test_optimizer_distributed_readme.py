"""The README's plugin works as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mimo.optimizer import ModuleParameters
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes


def _check_readme(rank: int) -> list[float]:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "sgd"}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - the README is ours
    spec, grid = names["SGD"], Grid(name="vision", ranks=(0, 1), dp=2)
    config = spec.config()
    module = Module(grid=grid, trains=(True,), shard_lanes=spec.shard_lanes(config))
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    stage = nn.Linear(1, 3, bias=False)
    weight = nn.Parameter(torch.zeros(3, 1))
    stage.weight = weight
    part = ModuleParameters(grid=grid, rank=rank, parameters={"vision.weight": weight}, modules=(stage,))
    prepared = spec.prepare(part, meshes, config)
    optimizer = spec.build(prepared.parameters, config, meshes)
    optimizer.param_groups[0]["lr"] = 1.0
    prepared.gather(ThreadPoolExecutor(1))
    stage(torch.full((1, 1), float(1 + rank))).sum().backward()
    prepared.reduce()
    prepared.settle("any")
    optimizer.step()
    (piece,) = prepared.parameters.values()
    assert isinstance(piece, DTensor)
    return [float(row) for row in piece.to_local().flatten()]


def test_readme_plugin(run_ranks: Callable[..., list[Any]]) -> None:
    """What an author copies steps this rank's rows by the sum of both lanes' gradients."""
    assert run_ranks(2, _check_readme) == [[-3.0, -3.0], [-3.0]]
