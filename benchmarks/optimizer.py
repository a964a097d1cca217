"""What `MimoOptimizer` adds to a step, how fast `hybrid` steps in host memory, and how much of that it hides.

*overhead*: 500 parameters of 1,024 numbers in one process and one thread, DTensors as in training, where there is so
little arithmetic that all else shows: CPU seconds of agreement, norm, clipping, scaling and step of ours, over those of
the step alone of `torch.optim.AdamW(fused=True)` on plain tensors, or of the same after `clip_grad_norm_`. They take
turns, step by step. *hybrid* is `_hybrid_step`, and *device* `_device_step`, which needs an accelerator; with
``--device cpu --size tiny`` the same runs without one, to see that it does. ``nox -s bench -- optimizer [--rounds N]
[--part overhead]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _device_step
import _hybrid_step
import torch
import torch.distributed as dist
from _found import Found, report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mimo.optimizer import LearningRate, LocalAdamWConfig, ModuleParameters
from mimo.optimizer._adamw import mimo_register_optimizers
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer, local_gradient
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

COUNT, SHAPE = 500, (32, 32)
STEPS = 200
"""Of each in a round, of which the median counts."""
RATE = LearningRate(lr=1e-3)
GRID = Grid(name="language", ranks=(0,))
CPU = torch.device("cpu")


def make_ours() -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """Return parameters of one module, and what steps them."""
    meshes = Meshes(ModuleGraph(modules=(Module(grid=GRID, trains=(True,)),), arrows=()), rank=0, device_type=CPU.type)
    mesh = meshes.tensor_mesh(GRID)
    parameters = {f"language.{index}": nn.Parameter(as_dtensor(torch.randn(SHAPE), mesh)) for index in range(COUNT)}
    (spec,) = mimo_register_optimizers()
    module = ModuleOptimizer.build(
        {0: ModuleParameters(grid=GRID, rank=0, parameters=parameters)},
        spec=spec,
        config=LocalAdamWConfig(),
        learning_rate=RATE,
        meshes=meshes,
    )
    optimizer = MimoOptimizer([module], names=["language"], learning_rate=RATE, clip=1.0, meshes=meshes, device=CPU)
    stats = LocalStats(label_weight=7, rows={"language": 7})

    def step(number: int) -> None:
        optimizer.step(number, stats)

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


PARTS = ("overhead", "hybrid", "device")


def measure(part: str, options: argparse.Namespace) -> Found:
    """Measure one part, in as many threads as it is to have."""
    torch.set_num_threads(1)
    if part == "overhead":
        return measure_overhead(options.rounds)
    if part == "hybrid":
        return _hybrid_step.measure(options.rounds)
    torch.set_num_threads(os.cpu_count() or 1)
    return _device_step.measure(options.rounds, device=options.device, size=options.size)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure; all if left out")
    parser.add_argument(
        "--device",
        type=torch.device,
        default=torch.accelerator.current_accelerator(check_available=True),
        help="of part device; an accelerator if there is one",
    )
    parser.add_argument("--size", choices=_device_step.SIZES, default="1B", help="of the model of part device")
    options = parser.parse_args()
    backend = "gloo" if options.device is None or options.device.type != "cuda" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        found = [measure(part, options) for part in options.part or PARTS]
        dist.destroy_process_group()
    report("optimizer", found, rounds=options.rounds)


if __name__ == "__main__":
    main()
