"""What a plugin's ranks may agree on before they build: over all that each of them builds, and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mimo.optimizer import LearningRate, ModuleParameters, OptimizerSpec, Pattern, Prepared, Rule, Rules, Share
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import LaidOut, build_together
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

RATE = LearningRate(lr=0.1)
GRIDS = {"vision": (0, 1), "language": (1,), "audio": (2,)}
GRAPH = ModuleGraph(
    modules=tuple(
        Module(grid=Grid(name=name, ranks=ranks, dp=len(ranks)), trains=(True,)) for name, ranks in GRIDS.items()
    ),
    arrows=(("vision", "language"), ("language", "audio")),
)
(ADAMW,) = mimo_register_optimizers()


@attrs.frozen(kw_only=True)
class Config:
    """How many parts there are."""

    parts: int


def prepare(_part: ModuleParameters, _meshes: object, _config: Config) -> Prepared:
    """Leave parameters as they are."""
    return Prepared(lambda: None)


def agree(shares: Sequence[Share], _meshes: object) -> list[str]:
    """Return for each share how many parts all ranks together have, and what it is of."""
    total = torch.tensor(sum(share.config.parts for share in shares))
    dist.all_reduce(total)
    return [f"{', '.join(share.part.parameters)}: {len(share.prepared)} of {total}" for share in shares]


def build(parameters: Mapping[str, nn.Parameter], given: str, _meshes: object) -> torch.optim.Optimizer:
    """Keep what was given."""
    return torch.optim.SGD([{"params": list(parameters.values()), "given": given}])


COUNTED = OptimizerSpec(
    name="counted", config=Config, rendezvous=lambda _config: False, prepare=prepare, agree=agree, build=build
)


def rule(parts: int) -> Rule:
    """Return a rule of the plugin."""
    return Rule(spec=COUNTED, config=Config(parts=parts), learning_rate=RATE)


RULES = {
    "vision": Rules(base=rule(1), patterns=(Pattern(glob="*.norm", table="optimizer", rule=rule(20)),)),
    "language": Rules(base=rule(300)),
    "audio": Rules(base=Rule(spec=ADAMW, config=LocalAdamWConfig(), learning_rate=RATE)),
}


def built(rank: int) -> list[Any]:
    """Return what each optimizer of a rank was given."""
    meshes = Meshes(GRAPH, rank=rank, device_type="cpu")
    laid_out = []
    for name, ranks in GRIDS.items():
        if rank in ranks:
            parameters = {f"{name}.{path}": nn.Parameter(torch.ones(2)) for path in ("weight", "norm")}
            part = ModuleParameters(grid=GRAPH.by_name[name].grid, rank=rank, parameters=parameters)
            laid_out.append(LaidOut.of({0: part}, RULES[name], meshes))
    specs = {spec.name: spec for one in RULES.values() for spec in one.specs}
    modules = build_together(laid_out, specs.values(), meshes)
    return [stepper.optimizer.param_groups[0].get("given") for module in modules for stepper in module.steppers]


def test_every_rank_takes_part_and_what_it_decides_is_built(run_ranks: Callable[..., list[Any]]) -> None:
    """A rank without the plugin is called too; a plugin that has nothing to agree on is given its config."""
    vision = ["vision.weight: 1 of 342", "vision.norm: 1 of 342"]
    assert run_ranks(3, built) == [vision, [*vision, "language.weight, language.norm: 1 of 342"], [None]]
