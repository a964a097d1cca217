"""A small third-party stage that is spread over lanes, beside one process: gradients and updates of two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.optimizer import ModuleParameters, Precision
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed import DISTRIBUTED, DistributedConfig

ROWS = (3, 5, 7)
"""Width in, inside and out: no number of lanes divides them."""


class Block(nn.Module):
    """A layer with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(ROWS[1], ROWS[1])

    def forward(self, x: Tensor) -> Any:
        return torch.add(x, torch.tanh(self.inner(x)))


class Stage(nn.Module):
    """A third-party module: where it gets no rows it runs no layer, and what it returns has no graph."""

    def __init__(self, *, layer: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(ROWS[0], ROWS[1])
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.leave = nn.Linear(ROWS[1], ROWS[2])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0, ROWS[2])
        return torch.mul(self.leave(self.run_layers(self.enter(x))), self.scale)

    def run_layers(self, x: Tensor) -> Tensor:
        """Return the rows behind the layers."""
        for layer in self.layers:
            x = cast("Tensor", layer(x))
        return x


def rows_of(lane: int, microbatch: int) -> Tensor:
    """Return what a lane reads."""
    return torch.randn(2, ROWS[0], generator=torch.Generator().manual_seed(7 * lane + microbatch))


@attrs.frozen(kw_only=True)
class Case:
    """Which lanes have rows in which microbatch, and how the stage is spread over them."""

    lanes: int
    config: DistributedConfig
    full: Sequence[frozenset[int]]
    precision: Precision = "fp32"
    frozen: str = ""
    stage: Callable[[], Stage] = Stage


def lay_out(rank: int, case: Case, stage: nn.Module) -> tuple[ModuleParameters, Meshes]:
    """Return the parameters of a stage as the plugin gets them, and the groups of its lanes."""
    grid = Grid(name="vision", ranks=range(case.lanes), dp=case.lanes)
    module = Module(
        grid=grid,
        trains=(True,),
        gathers=DISTRIBUTED.rendezvous(case.config),
        shard_lanes=DISTRIBUTED.shard_lanes(case.config),
        overlaps=DISTRIBUTED.overlaps(case.config),
    )
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    named = {f"vision.{path}": value for path, value in stage.named_parameters()}
    for name, value in named.items():
        value.requires_grad_(not (case.frozen and case.frozen in name))
    part = ModuleParameters(
        grid=grid,
        rank=rank,
        parameters={name: value for name, value in named.items() if value.requires_grad},
        frozen={name: value for name, value in named.items() if not value.requires_grad},
        modules=(stage,),
        precision=case.precision,
    )
    return part, meshes


def run(rank: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """Return gradients and weights after each of two steps, at full shape."""
    stage = case.stage()
    part, meshes = lay_out(rank, case, stage)
    prepared = DISTRIBUTED.prepare(part, meshes, case.config)
    pieces = {**part.parameters, **(prepared.parameters or {})}
    assert list(prepared.parameters or {}) == [name for name in part.parameters if name != "vision.scale"]
    optimizer = DISTRIBUTED.build(pieces, case.config, meshes)
    optimizer.param_groups[0]["lr"] = 0.1
    found = {}
    for step in (1, 2):
        for piece in pieces.values():
            piece.grad = None
        prepared.gather(ThreadPoolExecutor(1))
        for microbatch, filled in enumerate(case.full):
            x = rows_of(rank, microbatch) if rank in filled else torch.zeros(0, ROWS[0])
            x = x.to({"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision])
            with prepared.on_compute("forward"):
                y = stage(x)
            last = microbatch == len(case.full) - 1
            with prepared.on_grad_accumulation(None, last), prepared.on_compute("backward"):
                if y.requires_grad:
                    (y.float().square().sum() / y.shape[1]).backward()
        prepared.reduce()
        found[f"gradients {step}"] = {name: full(piece.grad) for name, piece in pieces.items()}
        prepared.synchronize("any")
        optimizer.step()
        found[f"weights {step}"] = {name: full(piece) for name, piece in pieces.items()}
    return found


def full(value: Tensor | None) -> Tensor:
    """Return a copy of a parameter or gradient at full shape."""
    assert value is not None
    assert value.dtype == torch.float32
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def alone(case: Case) -> dict[str, dict[str, Tensor]]:
    """Return the same of one process without any plugin."""
    stage = case.stage()
    named = {f"vision.{path}": value for path, value in stage.named_parameters()}
    trained = {name: value for name, value in named.items() if not (case.frozen and case.frozen in name)}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=0.1, betas=case.config.betas, eps=case.config.eps, weight_decay=case.config.weight_decay
    )
    x = torch.cat(
        [
            rows_of(lane, microbatch)
            for microbatch, filled in enumerate(case.full)
            for lane in range(case.lanes)
            if lane in filled
        ]
    )
    found = {}
    for step in (1, 2):
        optimizer.zero_grad()
        (stage(x).square().sum() / ROWS[2]).backward()
        found[f"gradients {step}"] = {name: full(value.grad) for name, value in trained.items()}
        optimizer.step()
        found[f"weights {step}"] = {name: full(value) for name, value in trained.items()}
    return found


SHARDS = ("optimizer", "gradients", "full")
EVERYBODY = frozenset(range(4))


def config_of(shard: Any, shard_lanes: int = 0, *, overlaps: bool = False) -> DistributedConfig:
    """Return the plugin's settings."""
    return DistributedConfig(
        shard=shard,
        shard_lanes=shard_lanes,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        eps=1e-4,
    )


def check_identical(
    found: Mapping[str, Mapping[str, Tensor]], true: Mapping[str, Mapping[str, Tensor]], rtol: float
) -> None:
    """Refuse what is not what one process has."""
    assert found.keys() == true.keys()
    for what, values in true.items():
        for name, value in values.items():
            torch.testing.assert_close({name: found[what][name]}, {name: value}, rtol=rtol, atol=rtol)
