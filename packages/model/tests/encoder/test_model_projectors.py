"""Projectors: what they compute, how many rows, what they cost, and over ranks against one (design law 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import (
    EncoderSpec,
    ProjectorConfig,
    packed_context,
    packed_tensor,
    projected_rows,
    projector_cost,
    projector_divisible,
)
from mimo.model.runtime import (
    ContextAxis,
    Linear,
    PackedEncoder,
    PackedRows,
    Part,
    Projector,
    TensorAxis,
    build_part,
    gradient_of,
    local,
)
from mimo.topology import Grid

WIDTH, HIDDEN, PREFIX = 6, 10, 2
GRIDS = ((4, 4), (8, 4), (4, 12), (4, 4))
RESAMPLER = ProjectorConfig(kind="resampler", hidden=12, queries=5, heads=6, layers=2)


@attrs.frozen(kw_only=True)
class Config:
    """Of an encoder that is hardly more than a projector."""

    projector: ProjectorConfig
    class_tokens: int = 0


CONFIGS = (
    Config(projector=ProjectorConfig(kind="linear", bias=False), class_tokens=1),
    Config(projector=ProjectorConfig(kind="linear", shuffle=2, norm="layer")),
    Config(projector=ProjectorConfig(norm="layer", hidden=7), class_tokens=2),
    Config(projector=ProjectorConfig(shuffle=2, norm="rms", activation="squared_relu", bias=False)),
    Config(projector=ProjectorConfig(shuffle=4)),
    Config(projector=RESAMPLER, class_tokens=2),
    Config(projector=attrs.evolve(RESAMPLER, shuffle=2, norm="layer", queries=3, activation="silu")),
)


class Model(PackedEncoder):
    """One product, then the projector."""

    def __init__(self, config: Config, hidden: int) -> None:
        super().__init__(())
        self.class_tokens = config.class_tokens
        self.embed = Linear(3, WIDTH)
        self.projector = Projector(config.projector, WIDTH, hidden)

    def forward(self, items: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return this rank's rows."""
        x = torch.cat([item["x"] for item in items]) if items else torch.zeros(0, 3)
        mine = self.rows.held(len(x))
        embedded = self.rows.pad(self.embed(x[mine.start : mine.stop]), total=len(x))
        grids = [item["grid"] for item in items]
        return self.projector(embedded, grids, self.rows, prefix=PREFIX, class_tokens=self.class_tokens)  # type: ignore[no-any-return]


SPEC = EncoderSpec(
    name="model",
    config=Config,
    measure=lambda raw: raw,
    rows=lambda config, size: projected_rows(config.projector, (size[0], size[1]), class_tokens=config.class_tokens),
    prepare=lambda _config, raw: raw,
    build=Model,
    tensor=packed_tensor(lambda config: projector_divisible(config.projector)),
    context=packed_context(),
)


def _items(grids: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(PREFIX + down * across, 3, generator=generator), "grid": (down, across)}
        for down, across in grids
    ]


def _build(config: Config, mesh: DeviceMesh, context: ContextAxis, *, sequence_parallel: bool = False) -> Part:
    axis = TensorAxis.of(mesh, sequence_parallel=sequence_parallel)
    part = build_part(
        SPEC,
        config,
        grid=Grid(name="eye", ranks=range(context.size * axis.size), cp=context.size, tp=axis.size),
        seed=5,
        axis=axis,
        mesh=mesh,
        device=torch.device("cpu"),
        hidden=HIDDEN,
        context=context,
    )
    with torch.no_grad():  # away from zero and one, equal on all ranks
        for name, parameter in part.parameters.items():
            if name.endswith("bias") or "norm" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                local(parameter).add_(part.splits[name].piece(noise, axis) * 0.3)
    return part


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = gradient_of(parameter)
    assert gradient is not None
    return gradient


def _run(part: Part, config: Config, grids: Sequence[tuple[int, int]], at: int = 0, slices: int = 1) -> Tensor:
    """Return slice ``at`` of the rows, after a backward with the same gradient in whatever slices."""
    found = part.encode(_items(grids), grids)
    total = sum(SPEC.rows(config, grid) for grid in grids)
    each = -(-total // slices)
    assert found.shape == (each, HIDDEN)
    gradient = torch.randn(total, HIDDEN, generator=torch.Generator().manual_seed(1))
    found.backward(pad(gradient, (0, 0, 0, slices * each - total))[at * each : (at + 1) * each])
    return found.detach()


def _check_layout(rank: int, cp: int, tp: int) -> None:
    world = dist.get_world_size()
    alone = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(world)][rank]
    mesh = DeviceMesh("cpu", torch.arange(world).view(cp, tp), mesh_dim_names=("cp", "tp"))
    context = ContextAxis.of(mesh.get_group("cp"))
    for config in CONFIGS:
        for grids in (GRIDS, GRIDS[1:2], ()):
            whole = _build(config, alone, ContextAxis.single())
            wanted = _run(whole, config, grids)
            for splits_rows in (False, True)[: min(tp, 2)]:
                part = _build(config, mesh["tp"], context, sequence_parallel=splits_rows)
                at, slices = (rank, world) if splits_rows else (context.rank, cp)
                found = _run(part, config, grids, at, slices)
                here = wanted[at * len(found) :][: len(found)]
                torch.testing.assert_close(found[: len(here)], here, rtol=1e-5, atol=1e-5)
                _check_gradients(whole, part, cp, tp)


def _check_gradients(whole: Part, part: Part, cp: int, tp: int) -> None:
    norm = torch.stack([_gradient(parameter).norm() for parameter in whole.parameters.values()]).norm()
    everyones: list[dict[str, Tensor]] = [{}] * (cp * tp)
    dist.all_gather_object(everyones, {name: _gradient(one) for name, one in part.parameters.items()})
    for name, other in whole.parameters.items():
        parts = [torch.stack([each[name] for each in everyones[tensor::tp]]).sum(0) for tensor in range(tp)]
        split = part.splits[name]
        if split.dim is not None:
            found = torch.cat(parts, split.dim)
        elif split.summed:
            found = torch.stack(parts).sum(0)
        else:
            found = parts[0]
            assert all(torch.equal(each, found) for each in parts), name
        difference = (found - _gradient(other)).norm()
        assert difference <= 1e-5 * max(float(_gradient(other).norm()), 1e-3 * float(norm)), (name, difference)


@pytest.mark.parametrize(
    ("cp", "tp"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((1, 2), (3, 1)))]
)
def test_layout_changes_nothing(run_ranks: Callable[..., list[Any]], cp: int, tp: int) -> None:
    """Rows and gradients of every kind over tensor and context ranks, rows whole and split, and without an item."""
    run_ranks(cp * tp, _check_layout, cp, tp)


def _joined(x: Tensor, grid: tuple[int, int], shuffle: int, class_tokens: int) -> Tensor:
    """Each row of an item is gathered from its place."""
    rows = [x[index] for index in range(class_tokens)]
    for down in range(0, grid[0], shuffle):
        for across in range(0, grid[1], shuffle):
            places = [(down + i) * grid[1] + across + j for i in range(shuffle) for j in range(shuffle)]
            rows.append(torch.cat([x[PREFIX + place] for place in places]))
    return torch.stack(rows)


def _norm(x: Tensor, kind: str, module: Any) -> Tensor:
    if kind == "none":
        return x
    if kind == "rms":
        rms: Tensor = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight
        return rms
    standard = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    found: Tensor = standard * module.weight + module.bias
    return found


def _act(x: Tensor, name: str) -> Tensor:
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "silu": lambda x: x * torch.sigmoid(x),
        "squared_relu": lambda x: x.clamp(min=0).square(),
    }
    return known[name](x)


def _product(x: Tensor, module: Any) -> Tensor:
    found: Tensor = x @ module.weight.T + (0 if module.bias is None else module.bias)
    return found


def _mlp(x: Tensor, module: Any, activation: str) -> Tensor:
    return _product(_act(_product(x, module.up), activation), module.down)


def _reference(config: Config, projector: Any, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """One item's rows."""
    settings = config.projector
    x = _norm(_joined(x, grid, settings.shuffle, config.class_tokens), settings.norm, getattr(projector, "norm", None))
    if settings.kind == "linear":
        return _product(x, projector.linear)
    if settings.kind == "mlp":
        return _mlp(x, projector.mlp, settings.activation)
    resampler = projector.resampler
    asks, width = resampler.queries.weight, settings.hidden // settings.heads
    for layer in resampler.layers.values():
        normed = _norm(asks, "layer", layer.attention_norm)
        query = _product(normed, layer.attention.query)
        key, value = _product(x, layer.attention.key), _product(x, layer.attention.value)
        heads = []
        for head in range(settings.heads):
            mine = slice(head * width, (head + 1) * width)
            heads.append((query[:, mine] @ key[:, mine].T / math.sqrt(width)).softmax(-1) @ value[:, mine])
        asks = asks + _product(torch.cat(heads, 1), layer.attention.output)
        asks = asks + _mlp(_norm(asks, "layer", layer.mlp_norm), layer.mlp, settings.activation)
    return _product(_norm(asks, "layer", resampler.norm), resampler.output)


def _random(config: Config) -> Projector:
    projector = Projector(config.projector, WIDTH, HIDDEN)
    with torch.no_grad():
        for index, parameter in enumerate(projector.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.4 + 0.1)
    return projector


def _check_formulas(_rank: int) -> None:
    for config in CONFIGS:
        projector = _random(config)
        x = torch.randn(sum(PREFIX + down * across for down, across in GRIDS), WIDTH, requires_grad=True)
        rows = projector(x, GRIDS, PackedRows(), prefix=PREFIX, class_tokens=config.class_tokens)
        items = x.split([PREFIX + down * across for down, across in GRIDS])
        wanted = torch.cat([_reference(config, projector, item, grid) for item, grid in zip(items, GRIDS, strict=True)])
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)
        gradient, over = torch.randn(rows.shape), (x, *projector.parameters())
        found = torch.autograd.grad(rows, over, gradient)
        for one, other in zip(found, torch.autograd.grad(wanted, over, gradient), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_equal_projectors_written_out(run_ranks: Callable[..., list[Any]]) -> None:
    """Rows and gradients are those of the formulas, item by item and row by row."""
    run_ranks(1, _check_formulas)


def _check_work(_rank: int) -> None:
    for config in CONFIGS:
        projector = _random(config)
        x = torch.randn(sum(PREFIX + down * across for down, across in GRIDS), WIDTH)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            rows = projector(x, GRIDS, PackedRows(), prefix=PREFIX, class_tokens=config.class_tokens)
        work = projector_cost(config.projector, GRIDS, width=WIDTH, hidden=HIDDEN, class_tokens=config.class_tokens)
        counted = counter.get_flop_counts()["Global"]
        assert sum(counted.values()) == work.weighted  # attention is not counted on CPUs
        assert work.weights == sum(parameter.numel() for parameter in projector.parameters())
        if config.projector.kind == "resampler":
            seen = sum(config.class_tokens + down * across // config.projector.shuffle**2 for down, across in GRIDS)
            assert work.inner == 2 * 2 * config.projector.layers * config.projector.queries * seen * 12
        assert len(rows) == sum(
            projected_rows(config.projector, grid, class_tokens=config.class_tokens) for grid in GRIDS
        )


def test_the_formula_counts_what_a_forward_takes(run_ranks: Callable[..., list[Any]]) -> None:
    """Operations and weights are those that PyTorch counts, rows those that are promised."""
    run_ranks(1, _check_work)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shuffle": 3}, r"config\.projector\.shuffle: expected 1, 2 or 4, got 3"),
        ({"hidden": -1}, r"config\.projector\.hidden: expected 0 or more, got -1"),
        (
            {"kind": "linear", "hidden": 8},
            r"config\.projector\.hidden: expected none, since a projector of kind 'linear'",
        ),
        ({"queries": 8}, r"config\.projector\.queries: expected none, since a projector of kind 'mlp' has no use"),
        ({"kind": "resampler", "queries": 0}, r"config\.projector\.queries: expected 1 or more, got 0"),
        (
            {"kind": "resampler"},
            r"config\.projector\.hidden: expected the resampler's own width, a multiple of heads = 8",
        ),
        ({"kind": "resampler", "hidden": 12}, r"config\.projector\.hidden: .* a multiple of heads = 8, got 12"),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """What is out of range or of no use to the kind is named."""
    with pytest.raises(ConfigError, match=message):
        ProjectorConfig(**values)


def test_tensor_ranks_share_a_resamplers_heads() -> None:
    """Only a resampler has heads that ``tp`` must divide."""
    assert projector_divisible(RESAMPLER) == {"projector.heads": 6}
    assert projector_divisible(ProjectorConfig()) == {}
