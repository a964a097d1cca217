"""The README's script and plugin work as they stand."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mimo.optimizer import ModuleParameters
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _check_readme(rank: int) -> list[float]:
    (code,) = re.findall(r"```python\n([^`]*SgdConfig.*?)```", README, re.DOTALL)
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
    prepared.synchronize("any")
    optimizer.step()
    (piece,) = prepared.parameters.values()
    assert isinstance(piece, DTensor)
    return [float(row) for row in piece.to_local().flatten()]


def test_readme_plugin(run_ranks: Callable[..., list[Any]]) -> None:
    """What an author copies steps this rank's rows by the sum of both lanes' gradients."""
    assert run_ranks(2, _check_readme) == [[-3.0, -3.0], [-3.0]]


def _run_script(_rank: int, script: str) -> list[float]:
    """Run a program that `torchrun` would start, in a group that exists; return the losses that it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the README is ours
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def test_optimizer_distributed_readme_script(run_ranks: Callable[..., list[Any]]) -> None:
    """A plain model has the same losses with one, two and three lanes, without our trainer."""
    (script,) = re.findall(r"```python\n([^`]*init_process_group.*?)```", README, re.DOTALL)
    for line in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert line in script
        script = script.replace(line, "")
    losses = {lanes: run_ranks(lanes, _run_script, script)[0] for lanes in (1, 2, 3)}
    assert len(losses[1]) == 8
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)
