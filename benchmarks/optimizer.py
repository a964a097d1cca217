"""What `MimoOptimizer` adds to a step of one bare AdamW, where there is so little arithmetic that it shows.

500 parameters of 1,024 numbers in one process and one thread, DTensors as in training: CPU seconds of agreement, norm,
clipping, scaling and step of ours, over those of the step alone of `torch.optim.AdamW(fused=True)` on plain tensors, or
of the same after `clip_grad_norm_`. They take turns, step by step. ``nox -s bench -- optimizer [--rounds N] [--part
overhead]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import _hybrid_step
import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer._adamw import AdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import MimoOptimizer, ModuleOptimizer, Tally, local_gradient
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

COUNT, SHAPE = 500, (32, 32)
STEPS = 200
"""Of each in a round, of which the median counts."""
RATE = LearningRate(lr=1e-3)
GRID = Grid(name="language", ranks=(0,))
CPU = torch.device("cpu")


@attrs.frozen(kw_only=True)
class Found:
    """What a part measured: the ratios of each round, by what they are, and what they should be."""

    ratios: Mapping[str, list[float]]
    aims: Mapping[str, tuple[str, float]]


def make_ours() -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """Return parameters of one module, and what steps them."""
    meshes = Meshes(ModuleGraph(modules=(Module(grid=GRID, trains=(True,)),), arrows=()), rank=0, device_type=CPU.type)
    mesh = meshes.tensor_mesh(GRID)
    parameters = {f"language.{index}": nn.Parameter(as_dtensor(torch.randn(SHAPE), mesh)) for index in range(COUNT)}
    (spec,) = mimo_register_optimizers()
    module = ModuleOptimizer.build(
        {0: ModuleParameters(grid=GRID, rank=0, parameters=parameters)},
        spec=spec,
        config=AdamWConfig(),
        learning_rate=RATE,
        meshes=meshes,
    )
    optimizer = MimoOptimizer([module], names=["language"], learning_rate=RATE, clip=1.0, meshes=meshes, device=CPU)
    tally = Tally(label_tokens=7, rows={"language": 7})

    def step(number: int) -> None:
        optimizer.step(number, tally)

    return list(parameters.values()), step


def as_dtensor(values: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return values as a DTensor that each rank of the mesh holds whole."""
    return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


def make_plain(*, clips: bool) -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """Return plain parameters, and what steps them: torch's AdamW, alone or after clipping by the norm."""
    parameters = [nn.Parameter(torch.randn(SHAPE)) for _ in range(COUNT)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE.lr, betas=(0.9, 0.95), fused=True)

    def step(_number: int) -> None:
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return parameters, step


def measure_overhead(rounds: int) -> Found:
    """Return seconds of our step over those of a bare one, and of one that clips."""
    kinds = {"ours": make_ours(), "bare AdamW": make_plain(clips=False), "AdamW and clipping": make_plain(clips=True)}
    values = [torch.randn(SHAPE) for _ in range(COUNT)]
    for parameters, _ in kinds.values():
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(1, STEPS + 1):
            for kind, (parameters, step) in kinds.items():
                for parameter, value in zip(parameters, values, strict=True):
                    local_gradient(parameter).copy_(value)  # steps scale them in place
                start = time.thread_time()
                step(number)
                seconds[kind].append(time.thread_time() - start)
        medians = {kind: statistics.median(found) for kind, found in seconds.items()}
        print(", ".join(f"{kind} {median * 1e3:.2f} ms" for kind, median in medians.items()))
        for kind in medians.keys() - {"ours"}:
            ratios.setdefault(f"step of {COUNT} small parameters, ours / {kind}", []).append(
                medians["ours"] / medians[kind]
            )
    return Found(ratios=ratios, aims={f"step of {COUNT} small parameters, ours / bare AdamW": ("<=", 1.2)})


def measure_hybrid(rounds: int) -> Found:
    """Return the speed of what the host steps, over that of one flat buffer and of memory."""
    return Found(ratios=_hybrid_step.measure(rounds), aims=_hybrid_step.AIMS)


PARTS: Mapping[str, Callable[[int], Found]] = {"overhead": measure_overhead, "hybrid": measure_hybrid}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure; all if left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        found = [PARTS[part](options.rounds) for part in options.part or PARTS]
        dist.destroy_process_group()
    ratios = {what: values for one in found for what, values in one.ratios.items()}
    result = {
        "bench": "optimizer",
        "ratios": {what: statistics.median(values) for what, values in ratios.items()},
        "aims": {what: list(aim) for one in found for what, aim in one.aims.items()},
        "runs": options.rounds,
        "spread": {what: [min(values), max(values)] for what, values in ratios.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
