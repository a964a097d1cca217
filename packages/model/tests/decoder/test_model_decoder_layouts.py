"""The decoder over tensor ranks and pipeline stages against itself on one rank (design law 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.runtime import NO_LABEL, LanguageBatch, Part, TensorAxis, build_part, local
from mimo.topology import Grid

SMALL = DecoderConfig(
    vocabulary=11, hidden=12, layers=3, heads=6, kv_heads=2, intermediate=10, attention_bias=True, mlp_bias=True
)
WIDE = attrs.evolve(SMALL, hidden=16, heads=12, kv_heads=3, head_dim=4)
NORMED = attrs.evolve(
    WIDE, query_key_norm=True, attention_bias=False, qkv_bias=True, sliding_window=4, mrope_section=(1, 1, 0)
)


def _batch(config: DecoderConfig, lengths: tuple[int, ...], rows: int) -> LanguageBatch:
    used = sum(lengths)
    tokens = torch.arange(rows) * 7 % config.vocabulary
    labels = tokens.roll(-1)
    labels[used:] = NO_LABEL
    labels[:2] = NO_LABEL
    positions = torch.cat([torch.arange(length) for length in (*lengths, 0)])
    positions = torch.nn.functional.pad(positions, (0, rows - used))
    return LanguageBatch.of(
        tokens=tokens,
        labels=labels,
        positions=positions,
        lengths=lengths,
        placeholders={"vision": torch.arange(6)[1:used:2], "audio": torch.zeros(0, dtype=torch.long)},
        grid_positions=torch.stack((positions, positions // 2, positions % 3), 1),
    )


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """Full tensors, whatever the layout."""

    losses: Tensor
    greedy: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    rows: Tensor


def _stages(config: DecoderConfig, mesh: DeviceMesh, axis: TensorAxis, pp: int) -> list[Part]:
    grid = Grid(name="language", ranks=range(pp * axis.size), pp=pp, tp=axis.size)
    return [
        build_part(
            DECODER,
            config,
            grid=grid,
            stage=Stage(stage, pp),
            seed=5,
            axis=axis,
            mesh=mesh,
            device=torch.device("cpu"),
        )
        for stage in range(pp)
    ]


def _joined(pieces: list[Tensor], dim: int | None) -> Tensor:
    if dim is not None:
        return torch.cat(pieces, dim)
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def _everyones(x: Tensor, axis: TensorAxis) -> list[Tensor]:
    pieces: list[Tensor] = [x] * axis.size
    if axis.size > 1:
        dist.all_gather_object(pieces, x, group=axis.group)
    return pieces


def _run(config: DecoderConfig, batch: LanguageBatch, mesh: DeviceMesh, *, sequence_parallel: bool, pp: int) -> Outcome:
    axis = TensorAxis.of(mesh, sequence_parallel=sequence_parallel)
    stages = _stages(config, mesh, axis, pp)
    at = batch.placeholders["vision"]
    rows = torch.randn(len(at), config.hidden, generator=torch.Generator().manual_seed(2))
    if axis.splits_rows:
        span = axis.span(len(batch.tokens))
        rows = rows[(at >= span.start) & (at < span.stop)]
    rows = rows.clone().requires_grad_()
    hidden: Tensor | None = None
    for stage in stages:
        given = {"vision": rows, "audio": rows[:0]} if stage.stage.is_first else {}
        hidden = stage.language(batch, given, hidden)
    assert hidden is not None
    losses = stages[-1].language.losses(hidden, batch.labels)
    losses.sum().backward()
    greedy = stages[-1].language.greedy(hidden)
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            split = stage.splits[name]
            assert tuple(parameter.shape) == tuple(parameter.grad.shape) if parameter.grad is not None else True
            value = local(parameter.detach())
            grad = torch.zeros_like(value) if parameter.grad is None else local(parameter.grad)
            pieces = _everyones(grad, axis)
            full = torch.stack(pieces).sum(0) if split.summed and axis.size > 1 else _joined(pieces, split.dim)
            value = _joined(_everyones(value, axis), split.dim)
            assert tuple(value.shape) == tuple(parameter.shape)
            if name in stage.tied_copies:
                assert torch.equal(value, weights[name])
                gradients[name] += full
            else:
                assert name not in weights
                weights[name], gradients[name] = value, full
    assert rows.grad is not None
    row_gradients = _everyones(rows.grad, axis)
    return Outcome(
        losses=losses.detach(),
        greedy=greedy,
        weights=weights,
        gradients=gradients,
        rows=_joined(row_gradients, 0 if axis.splits_rows else None),
    )


def _check_layout(rank: int, config: DecoderConfig, lengths: tuple[int, ...], sequence_parallel: bool, pp: int) -> None:
    world = dist.get_world_size()
    alone = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(world)][rank]
    mesh = alone if world == 1 else DeviceMesh("cpu", range(world), mesh_dim_names=("tp",))
    total = -(-sum(lengths) // world) * world
    batch = _batch(config, lengths, total)
    wanted = _run(config, batch, alone, sequence_parallel=False, pp=1)
    found = _run(config, batch, mesh, sequence_parallel=sequence_parallel, pp=pp)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.greedy, wanted.greedy)
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), name
    whole = torch.stack([gradient.norm() for gradient in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        difference = (found.gradients[name] - gradient).norm()
        assert difference <= 1e-5 * max(gradient.norm(), 1e-3 * whole), (name, difference, gradient.norm())
    torch.testing.assert_close(found.rows, wanted.rows, rtol=1e-4, atol=1e-6)


LAYOUTS = [
    ("small", 1, False, 3),
    ("small tied", 1, False, 2),
    ("small", 2, False, 1),
    ("small", 2, True, 1),
    ("small", 3, False, 1),
    ("small", 3, True, 2),
    ("small tied", 2, True, 3),
    ("wide", 2, False, 1),
    ("wide", 4, False, 2),
    ("wide", 4, True, 1),
    ("wide tied", 4, True, 1),
    ("narrow vocabulary", 4, True, 1),
    ("normed", 3, False, 2),
    ("normed", 2, True, 1),
    ("normed", 4, True, 2),
]
CONFIGS = {
    "small": SMALL,
    "small tied": attrs.evolve(SMALL, tied=True),
    "wide": WIDE,
    "wide tied": attrs.evolve(WIDE, tied=True, attention_bias=False),
    "normed": NORMED,
    "narrow vocabulary": attrs.evolve(WIDE, vocabulary=5, intermediate=5),
}


@pytest.mark.parametrize(("name", "tp", "sequence_parallel", "pp"), LAYOUTS)
def test_layout_changes_nothing(
    run_ranks: Callable[..., list[Any]], name: str, tp: int, sequence_parallel: bool, pp: int
) -> None:
    """Initial weights bitwise, losses, argmax and every gradient within law 1, with uneven and empty pieces too."""
    run_ranks(tp, _check_layout, CONFIGS[name], (6, 0, 3, 5), sequence_parallel, pp)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("lengths", [(), (0,), (1,)])
def test_layout_of_next_to_nothing(
    run_ranks: Callable[..., list[Any]], lengths: tuple[int, ...], sequence_parallel: bool
) -> None:
    """No rows, or a single one with the rest padding, runs on all tensor ranks."""
    run_ranks(2, _check_layout, SMALL, lengths, sequence_parallel, 2)
