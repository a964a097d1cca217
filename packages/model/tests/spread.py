"""A language model over any ranks against itself on one rank: outputs, losses, loads and every gradient (law 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, HYBRID, DecoderConfig, HybridConfig, LanguageModelSpec, Stage
from mimo.model.runtime import (
    NO_LABEL,
    Choices,
    ContextAxis,
    ExpertAxis,
    LanguageBatch,
    Part,
    Router,
    TensorAxis,
    build_part,
    local,
)
from mimo.topology import ROW_AXES, Grid, Module, ModuleGraph, context_spans
from mimo.topology.meshes import Meshes

Config: TypeAlias = DecoderConfig | HybridConfig

GAP = 1e-4
"""Between the last score that is chosen and the next: below it rounding could choose otherwise."""
LANES = ((6, 0, 3, 5), (4, 7), (), (1,))


def spec_of(config: Config) -> LanguageModelSpec:
    """Return whose settings they are."""
    return HYBRID if isinstance(config, HybridConfig) else DECODER


@attrs.frozen(kw_only=True)
class Layout:
    """A grid, its pipeline stages played by every rank in turn, and the samples of its lanes."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    lanes: tuple[tuple[int, ...], ...] = LANES[:1]

    def grid(self, pp: int) -> Grid:
        """Return it with ``pp`` stages."""
        sizes = {name: getattr(self, name) for name in ("dp", "cp", "tp", "ep", "etp")}
        return Grid(name="language", ranks=range(pp * self.dp * self.cp * self.tp), pp=pp, **sizes)


def _batch(config: Config, lengths: Sequence[int], *, lane: int, layout: Layout, context: int) -> LanguageBatch:
    """Return what one context rank holds of a lane's samples; with sequence parallelism padded as it must be."""
    tokens, labels, positions, samples, label_tokens = [], [], [], [], []
    for sample, length in enumerate(lengths):
        ids = (torch.arange(length + 1) * 7 + 3 * sample + 5 * lane) % config.vocabulary
        targets = ids[1:].clone()
        targets[::3] = NO_LABEL
        label_tokens.append(int((targets != NO_LABEL).sum()))
        for start, stop in context_spans(length, size=layout.cp, rank=context):
            tokens.append(ids[start:stop])
            labels.append(targets[start:stop])
            positions.append(torch.arange(start, stop))
            samples.append(torch.full((stop - start,), sample))
    padding = -sum(map(len, tokens)) % layout.tp if layout.sequence_parallel else 0
    tokens.append(torch.zeros(padding, dtype=torch.long))
    labels.append(torch.full((padding,), NO_LABEL))
    positions.append(torch.zeros(padding, dtype=torch.long))
    samples.append(torch.full((padding,), len(lengths)))
    return LanguageBatch(
        tokens=torch.cat(tokens),
        labels=torch.cat(labels),
        positions=torch.cat(positions),
        lengths=tuple(lengths),
        placeholders={},
        samples=torch.cat(samples),
        label_tokens=tuple(label_tokens),
    )


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """What one rank found, or all of them together."""

    losses: Tensor
    further: dict[str, Tensor]
    loads: dict[str, Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _stages(config: Config, layout: Layout, meshes: Meshes, rank: int) -> list[Part]:
    flat, grid = layout.grid(1), layout.grid(layout.pp)
    mesh = meshes.tensor_mesh(flat)
    parts = []
    for stage in range(layout.pp):
        part = build_part(
            spec_of(config),
            config,
            grid=grid,
            stage=Stage(stage, layout.pp),
            seed=3,
            axis=TensorAxis.of(mesh, sequence_parallel=layout.sequence_parallel),
            mesh=mesh,
            device=torch.device("cpu"),
            context=ContextAxis.of(meshes.axes_group(flat, ("cp",))),
            experts=ExpertAxis.of(
                flat,
                rank,
                group=meshes.axes_group(flat, ("ep", "etp")),
                rows=meshes.axes_group(flat, ROW_AXES),
            ),
            expert_mesh=meshes.expert_mesh(flat),
        )
        for name, parameter in part.parameters.items():
            if name.endswith("router.bias"):
                assert not parameter.requires_grad
                local(parameter.detach()).copy_(torch.linspace(-0.05, 0.05, config.experts))
        parts.append(part)
    return parts


def _watch(part: Part, gaps: list[float]) -> None:
    def look(router: Router, _given: tuple[Tensor], choices: Choices) -> None:
        scores = choices.scores if router.bias is None else choices.scores + local(router.bias)
        best = scores.detach().sort(1, descending=True).values
        gaps.extend((best[:, router.chosen - 1] - best[:, router.chosen]).tolist())

    for module in part.module.modules():
        if isinstance(module, Router):
            module.register_forward_hook(look)


def _run(stages: Sequence[Part], batches: Sequence[LanguageBatch]) -> Outcome:
    losses = [torch.zeros(())]
    further: dict[str, Tensor] = {}
    loads: dict[str, Tensor] = {}
    for batch in batches:
        hidden: Tensor | None = None
        for stage in stages:
            hidden = stage.language(batch, {}, hidden)
        assert hidden is not None
        found = stages[-1].language.losses(hidden, batch.labels)
        losses.append(found.detach().sum())
        (found.sum() + sum(batch.aux_losses.losses.values())).backward()
        for name, value in batch.aux_losses.losses.items():
            further[name] = further.get(name, torch.zeros(())) + value.detach()
        for name, value in batch.aux_losses.counts.items():
            loads[name] = loads.get(name, torch.zeros_like(value)) + value
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            weights[name] = local(parameter.detach())
            if parameter.requires_grad:
                assert parameter.grad is not None, name  # a rank without rows takes part too
                assert parameter.grad.shape == parameter.shape
                gradients[name] = local(parameter.grad)
    return Outcome(losses=torch.stack(losses).sum(), further=further, loads=loads, weights=weights, gradients=gradients)


def _over(
    grid: Grid, axes: Sequence[str], pieces: Mapping[int, Tensor], join: Callable[[list[Tensor]], Tensor]
) -> dict[int, Tensor]:
    """Join the pieces of each group along ``axes``; return the results by the group's first rank."""
    groups = [[rank for rank in group if rank in pieces] for group in grid.groups(axes)]
    return {group[0]: join([pieces[rank] for rank in group]) for group in groups if group}


def _total(pieces: list[Tensor]) -> Tensor:
    return torch.stack(pieces).sum(0)


def _equal(pieces: list[Tensor]) -> Tensor:
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def _whole(layout: Layout, stages: Sequence[Part], found: Sequence[Outcome]) -> Outcome:
    """Return full tensors of what all ranks found, put together as the splits say."""
    grid = layout.grid(1)
    splits = {name: split for stage in stages for name, split in stage.splits.items()}

    def joined(name: str, kind: str, over_copies: Callable[[list[Tensor]], Tensor]) -> Tensor:
        split = splits[name]
        pieces = {rank: getattr(one, kind)[name] for rank, one in enumerate(found)}
        if split.experts:
            pieces = _over(grid, ("edp",), pieces, over_copies)
            assert split.dim is not None
            dim = split.dim
            pieces = _over(grid, ("etp",), pieces, lambda each: torch.cat(each, dim))
            pieces = _over(grid, ("ep",), pieces, torch.cat)
        else:
            pieces = _over(grid, ("dp", "cp"), pieces, over_copies)
            if split.dim is None:
                partial = split.summed and kind == "gradients"
                pieces = _over(grid, ("tp",), pieces, _total if partial else _equal)
            else:
                cut = split.dim
                pieces = _over(grid, ("tp",), pieces, lambda each: torch.cat(each, cut))
        (whole,) = pieces.values()
        return whole

    first = [one for rank, one in enumerate(found) if grid.coordinates(rank).tp == 0]
    return Outcome(
        losses=_total([one.losses for one in first]),
        further={name: _total([one.further[name] for one in found]) for name in found[0].further},
        loads={name: _total([one.loads[name] for one in found]) for name in found[0].loads},
        weights={name: joined(name, "weights", _equal) for name in found[0].weights},
        gradients={name: joined(name, "gradients", _total) for name in found[0].gradients},
    )


def check_layout(rank: int, config: Config, layout: Layout) -> None:
    """Compare a layout of ranks with one rank, and all parts of it with each other (law 1)."""
    grid = layout.grid(1)
    module = Module(grid=grid, trains=(True,), experts=config.experts > 0)
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    place = grid.coordinates(rank)
    stages = _stages(config, layout, meshes, rank)
    lane = place.dp
    found = _run(stages, [_batch(config, layout.lanes[lane], lane=lane, layout=layout, context=place.cp)])
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, found)
    whole = _whole(layout, stages, outcomes)
    if rank:
        return
    alone, gaps = Layout(lanes=layout.lanes), list[float]()
    part = build_part(
        spec_of(config), config, grid=alone.grid(1), seed=3, axis=TensorAxis.single(),
        mesh=DeviceMesh.from_group(meshes.group((0,)), "cpu", mesh_dim_names=("tp",)), device=torch.device("cpu"),
        expert_mesh=DeviceMesh.from_group(
            [meshes.group((0,)), meshes.group((0,))], "cpu", mesh=torch.tensor([[0]]), mesh_dim_names=("ep", "etp")
        ),
    )  # fmt: skip
    for name, parameter in part.parameters.items():
        local(parameter.detach()).copy_(whole.weights[name]) if name.endswith("router.bias") else None
    _watch(part, gaps)
    batches = [_batch(config, lengths, lane=lane, layout=alone, context=0) for lane, lengths in enumerate(layout.lanes)]
    wanted = _run([part], batches)
    assert min(gaps, default=1.0) > GAP, min(gaps)
    torch.testing.assert_close(whole.losses, wanted.losses, rtol=1e-6, atol=1e-6)
    assert whole.further.keys() == wanted.further.keys()
    for name, loss in wanted.further.items():
        torch.testing.assert_close(whole.further[name], loss, rtol=2e-6, atol=1e-6)
    assert whole.loads.keys() == wanted.loads.keys() == {f"layers.{index}.load" for index in config.expert_layers}
    rows = sum(map(sum, layout.lanes))
    for name, load in wanted.loads.items():
        assert torch.equal(whole.loads[name], load), name
        assert int(load.sum()) == rows * config.experts_per_token
    assert whole.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(whole.weights[name], weight), name
    norm = torch.stack([gradient.norm() for gradient in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        difference = (whole.gradients[name] - gradient).norm()
        assert difference <= 1e-5 * max(gradient.norm(), 1e-3 * norm), (name, difference, gradient.norm())
