"""Rules and clip groups of single parameters over modules on four ranks, against plain AdamW in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.optimizer import LearningRate, ModuleParameters, Pattern, Rule
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer, StepResult, local_gradient
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

SHAPES = {
    "vision.patch": (5, 3),
    "vision.norm": (4,),
    "vision.head": (2, 6),
    "language.up": (5, 4),
    "language.down": (4, 5),
    "language.norm": (3,),
}
SPLIT = {"language.up", "language.down"}
STEPS, TOKENS, CLIP = 3, 7, 0.05
CLIPS = {"heads": CLIP / 4}
GRAPH = ModuleGraph(
    modules=(
        Module(grid=Grid(name="vision", ranks=(0, 1, 2), dp=3), trains=(True,)),
        Module(grid=Grid(name="language", ranks=(2, 3), tp=2), trains=(True,)),
    ),
    arrows=(("vision", "language"),),
)
(ADAMW,) = mimo_register_optimizers()


@attrs.frozen(kw_only=True)
class MomentumConfig:
    """Settings of plain momentum."""

    momentum: float = 0.9


class Momentum(torch.optim.SGD):
    """SGD with momentum on local tensors, its state there from the start; scales gradients by itself."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], momentum: float) -> None:
        super().__init__(parameters.values(), lr=0.0, momentum=momentum, foreach=False)
        self.defaults["gradient_scale"] = 1.0
        for parameter in parameters.values():
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step."""
        assert closure is None
        (group,) = self.param_groups
        for parameter in group["params"]:
            average = self.state[parameter]["momentum_buffer"]
            average.mul_(group["momentum"]).add_(parameter.grad, alpha=group["gradient_scale"])
            parameter.add_(average, alpha=-group["lr"])


MOMENTUM = attrs.evolve(
    ADAMW,
    name="momentum",
    config=MomentumConfig,
    build=lambda parameters, config, _meshes: Momentum(parameters, config.momentum),
)
BASES = {
    "vision": Rule(spec=ADAMW, config=LocalAdamWConfig(weight_decay=0.1), learning_rate=LearningRate(lr=0.01)),
    "language": Rule(
        spec=ADAMW,
        config=LocalAdamWConfig(weight_decay=0.2, betas=(0.8, 0.99)),
        learning_rate=LearningRate(lr=0.02, lr_warmup_steps=2),
    ),
}
PLAIN = Rule(spec=ADAMW, config=LocalAdamWConfig(weight_decay=0.0), learning_rate=LearningRate(lr=0.05))
OTHER = Rule(spec=MOMENTUM, config=MomentumConfig(momentum=0.5), learning_rate=LearningRate(lr=0.1))


def full(name: str, salt: int) -> Tensor:
    """Return numbers that depend on a name and ``salt`` only; some gradients are exactly zero."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + salt)
    values = torch.randn(SHAPES[name], generator=generator)
    return values if salt == 0 else values * (torch.rand(SHAPES[name], generator=generator) > 0.3)


def rules_of(name: str, clip_by: str, named: bool) -> tuple[Rule, dict[str, Rule]]:
    """Return the rule of each pattern, written out for this test: norms without decay, one weight by momentum."""
    module = name.partition(".")[0]
    group = module if clip_by == "module" else ""
    head = attrs.evolve(OTHER, clip_group="heads" if named else group)
    base = attrs.evolve(BASES[module], clip_group=group)
    plain = attrs.evolve(PLAIN, clip_group=group)
    rules = {"*.norm": plain, "vision.head": head, "language.down": attrs.evolve(base, clip_group=head.clip_group)}
    return base, {glob: rule for glob, rule in rules.items() if glob.startswith(("*", module))}


def rule_of(name: str, clip_by: str, named: bool) -> Rule:
    """Return the rule that a parameter is to follow."""
    base, rules = rules_of(name, clip_by, named)
    return rules["*.norm"] if name.endswith(".norm") else rules.get(name, base)


def reference(_rank: int, clip_by: str, named: bool) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return weights of torch's own optimizers, one for each parameter, and the norms of clip groups."""
    weights = {name: nn.Parameter(full(name, 0)) for name in SHAPES}
    rules = {name: rule_of(name, clip_by, named) for name in SHAPES}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, rule in rules.items():
        config: Any = rule.config
        if rule.spec is MOMENTUM:
            optimizers[name] = torch.optim.SGD([weights[name]], momentum=config.momentum)
        else:
            optimizers[name] = torch.optim.AdamW(
                [weights[name]], betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
            )
    found = []
    for step in range(1, STEPS + 1):
        groups: dict[str, list[nn.Parameter]] = {}
        for name, weight in weights.items():
            weight.grad = full(name, step) / TOKENS
            groups.setdefault(rules[name].clip_group, []).append(weight)
        found.append({group: clip(members, CLIPS.get(group, CLIP)) for group, members in groups.items()})
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = rules[name].learning_rate.at(step)
            optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}, found


def clip(parameters: list[nn.Parameter], most: float) -> float:
    """Shorten gradients to the longest that they may be together; return how long they were."""
    return float(nn.utils.clip_grad_norm_(parameters, most))


def build(rank: int, clip_by: str, named: bool) -> MimoOptimizer:
    """Make the optimizer of a rank."""
    meshes = Meshes(GRAPH, rank=rank, device_type="cpu")
    modules, groups = [], {}
    for module in GRAPH.modules:
        name = module.name
        base, rules = rules_of(f"{name}.", clip_by, named)
        patterns = [Pattern(glob=glob, table="optimizer", rule=rule) for glob, rule in rules.items()]
        groups[name] = tuple(dict.fromkeys([base.clip_group, *(pattern.rule.clip_group for pattern in patterns)]))
        if rank in module.grid:
            parameters = {path: parameter(path, rank, meshes) for path in SHAPES if path.startswith(name)}
            part = ModuleParameters(grid=module.grid, rank=rank, parameters=parameters)
            built = ModuleOptimizer.build(
                {0: part},
                spec=base.spec,
                config=base.config,
                learning_rate=base.learning_rate,
                meshes=meshes,
                clip_group=base.clip_group,
                patterns=patterns,
            )
            modules.append(built)
    return MimoOptimizer(
        modules,
        names=[module.name for module in GRAPH.modules],
        learning_rate=BASES["language"].learning_rate,
        clip=CLIP,
        clips=CLIPS,
        clip_groups=groups,
        counts_zeros=True,
        meshes=meshes,
        device=torch.device("cpu"),
    )


def lay(path: str, values: Tensor, rank: int, like: Meshes | DTensor) -> DTensor:
    """Return this rank's piece of the values of a parameter."""
    grid = GRAPH.by_name[path.partition(".")[0]].grid
    mesh = like.device_mesh if isinstance(like, DTensor) else like.tensor_mesh(grid)
    split = path in SPLIT
    local = values.chunk(grid.tp)[grid.coordinates(rank).tp].contiguous() if split else values
    placements = [Shard(0) if split else Replicate()]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
    )


def parameter(path: str, rank: int, meshes: Meshes) -> nn.Parameter:
    """Return a parameter as it lies on a rank."""
    return nn.Parameter(lay(path, full(path, 0), rank, meshes))


def give(optimizer: MimoOptimizer, rank: int, step: int) -> None:
    """Hand each parameter this lane's share of its gradient, and sum them."""
    for name, module in optimizer.modules.items():
        for path, value in module.part.parameters.items():
            assert isinstance(value, DTensor)
            value.grad = lay(path, full(path, step) / module.part.grid.dp, rank, value)
        optimizer.reduce(name, 0)


def train(rank: int, clip_by: str, named: bool) -> tuple[dict[str, Tensor], list[StepResult], dict[str, list[str]]]:
    """Step a few times; return this rank's whole weights, what steps came to, and the names of states."""
    optimizer, found = build(rank, clip_by, named), []
    for step in range(1, STEPS + 1):
        give(optimizer, rank, step)
        stats = LocalStats(label_weight=TOKENS if rank == 3 else 0, rows={"vision": 1, "language": 1})
        found.append(optimizer.step(step, stats))
        optimizer.zero_gradients()
    weights = {
        name: value.full_tensor().detach()
        for module in optimizer.modules.values()
        for name, value in module.part.parameters.items()
        if isinstance(value, DTensor)
    }
    return weights, found, {name: list(tree) for name, tree in optimizer.state().items()}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("clip_by", ["global", "module"])
def test_optimizer_patterns_and_clip_groups_equal_one_process(
    clip_by: str, named: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Each parameter is stepped by its own plugin, settings and learning rate, and clipped by its own group's norm."""
    ((expected, norms),) = run_ranks(1, reference, clip_by, named)
    for weights, steps, _ in run_ranks(4, train, clip_by, named):
        for stepped, groups in zip(steps, norms, strict=True):
            assert stepped.group_norms == pytest.approx(groups, rel=1e-6)
            assert stepped.norm == pytest.approx(math.hypot(*groups.values()), rel=1e-6)
            assert math.hypot(*stepped.norms.values()) == pytest.approx(stepped.norm, rel=1e-6)
            assert stepped.norms.keys() == {"vision", "language"}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_optimizer_patterns_keep_the_names_and_the_order_of_states(run_ranks: Callable[..., list[Any]]) -> None:
    """They are those of parameters, whatever steps them."""
    adamw = ("step", "exp_avg", "exp_avg_sq")
    vision = [f"{path}.{key}" for path in ("patch", "norm") for key in adamw] + ["head.momentum_buffer"]
    language = [f"{path}.{key}" for path in ("up", "down", "norm") for key in adamw]
    names = [found for _, _, found in run_ranks(4, train, "global", False)]
    assert names == [{"vision": vision}] * 2 + [{"vision": vision, "language": language}, {"language": language}]


def test_optimizer_zero_gradients_are_counted_once(run_ranks: Callable[..., list[Any]]) -> None:
    """Of all lanes and shards together, as many as the whole gradient has."""
    for _, steps, _ in run_ranks(4, train, "global", False):
        for step, stepped in enumerate(steps, start=1):
            expected = {
                module: sum(int((full(name, step) == 0).sum()) for name in SHAPES if name.startswith(module))
                for module in ("vision", "language")
            }
            assert stepped.agreed.zeros == expected
            assert all(expected.values())


def corrupt(rank: int, name: str) -> tuple[bool, float, bool]:
    """Take a step with a gradient that is not finite in one clip group; return its result, and what has changed."""
    optimizer = build(rank, "module", named=True)
    give(optimizer, rank, 1)
    if rank == 3:
        for module in optimizer.modules.values():
            local_gradient(module.part.parameters[name]).fill_(math.inf)
    stepped = optimizer.step(1, LocalStats(label_weight=TOKENS if rank == 3 else 0, rows={"vision": 1, "language": 1}))
    state = [value for tree in optimizer.state().values() for value in tree.values()]
    changed = any(float(lay_out(value).abs().sum()) for value in state)
    return stepped.skipped, stepped.group_norms["vision"], changed


def lay_out(value: Any) -> Tensor:
    """Return a tensor of a state, whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("name", ["language.norm", "language.down"])
def test_optimizer_patterns_skip_together(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    """One clip group that is not finite on one rank, even in a copy that another counts, leaves all as they are."""
    for skipped, norm, changed in run_ranks(4, corrupt, name):
        assert (skipped, math.isfinite(norm), changed) == (True, True, False)
