"""The decoder over context ranks, tensor ranks and stages against itself on one rank (design law 1)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.parallel import context
from mimo.model.runtime import (
    NO_LABEL,
    ContextAxis,
    LanguageBatch,
    Part,
    TensorAxis,
    build_part,
    gradient_of,
    local,
)
from mimo.topology import Grid, context_spans

SMALL = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=6, kv_heads=2, intermediate=10, attention_bias=True, mlp_bias=True
)
WIDE = attrs.evolve(
    SMALL,
    hidden=16,
    heads=12,
    kv_heads=3,
    head_dim=4,
    tied=True,
    query_key_norm=True,
    attention_bias=False,
    qkv_bias=True,
    sliding_window=7,
    mrope_section=(1, 0, 1),
)
LENGTHS = [(6, 0, 13, 5), (1, 2), (40, 33), (3,), (0,), ()]


def _whole(config: DecoderConfig, lengths: tuple[int, ...]) -> LanguageBatch:
    used = sum(lengths)
    tokens = torch.arange(used) * 7 % config.vocabulary
    labels = tokens.roll(-1)
    labels[1::4] = NO_LABEL
    positions = torch.cat([torch.arange(length) for length in (*lengths, 0)])
    return LanguageBatch.of(
        tokens=tokens,
        labels=labels,
        positions=positions,
        grid_positions=torch.stack((positions, positions // 2, positions % 5), 1),
        lengths=lengths,
        placeholders={"vision": torch.arange(used)[1::3], "audio": torch.zeros(0, dtype=torch.long)},
    )


def _share(whole: LanguageBatch, context: ContextAxis, multiple: int) -> tuple[LanguageBatch, Tensor]:
    """Return what one context rank holds of a batch, and which of its rows they are."""
    firsts = [0, *accumulate(whole.lengths)]
    here = torch.tensor(
        [
            firsts[sample] + at
            for sample, length in enumerate(whole.lengths)
            for span in context_spans(length, size=context.size, rank=context.rank)
            for at in range(*span)
        ],
        dtype=torch.long,
    )
    more = (0, -len(here) % multiple)
    return (
        attrs.evolve(
            whole,
            tokens=pad(whole.tokens[here], more),
            labels=pad(whole.labels[here], more, value=NO_LABEL),
            positions=pad(whole.positions[here], more),
            grid_positions=None if whole.grid_positions is None else pad(whole.grid_positions[here], (0, 0, *more)),
            samples=pad(whole.samples[here], more, value=len(whole.lengths)),
            placeholders={
                name: torch.isin(here, places).nonzero().squeeze(1) for name, places in whole.placeholders.items()
            },
        ),
        here,
    )


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """What one rank found: of its rows, and of its pieces of the parameters."""

    losses: Tensor
    greedy: Tensor
    rows: Tensor
    gradients: dict[str, Tensor]
    stages: list[Part]


def _run(
    config: DecoderConfig,
    batch: LanguageBatch,
    rows: Tensor,
    *,
    mesh: DeviceMesh,
    axis: TensorAxis,
    context: ContextAxis,
    pp: int,
) -> Outcome:
    grid = Grid(name="language", ranks=range(pp * context.size * axis.size), pp=pp, cp=context.size, tp=axis.size)
    rows = rows.clone().requires_grad_()
    hidden: Tensor | None = None
    stages = [
        build_part(
            DECODER,
            config,
            grid=grid,
            stage=Stage(stage, pp),
            seed=5,
            axis=axis,
            mesh=mesh,
            device=torch.device("cpu"),
            context=context,
        )
        for stage in range(pp)
    ]
    for stage in stages:
        given = {"vision": rows, "audio": rows[:0]} if stage.stage.is_first else {}
        hidden = stage.language(batch, given, hidden)
    assert hidden is not None
    losses = stages[-1].language.losses(hidden, batch.labels)
    losses.sum().backward()
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            found = gradient_of(parameter)
            gradient = torch.zeros_like(local(parameter)) if found is None else found
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    assert rows.grad is not None
    greedy = stages[-1].language.greedy(hidden)
    return Outcome(losses=losses.detach(), greedy=greedy, rows=rows.grad, gradients=gradients, stages=stages)


def _joined(found: Outcome, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return all parameters' full gradients: parts of context ranks add up, pieces of tensor ranks join."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {name: gradient.detach() for name, gradient in found.gradients.items()})
    splits = {name: split for stage in found.stages for name, split in stage.splits.items()}
    full = {}
    for name, split in splits.items():
        cp, tp = shape
        pieces = [
            torch.stack([everyones[context * tp + tensor][name] for context in range(cp)]).sum(0)
            for tensor in range(tp)
        ]
        if split.dim is not None:
            full[name] = torch.cat(pieces, split.dim)
        elif split.summed:
            full[name] = torch.stack(pieces).sum(0)
        else:
            for piece in pieces:
                torch.testing.assert_close(piece, pieces[0], rtol=1e-5, atol=1e-7)
            full[name] = pieces[0]
    return full


def _check_case(
    config: DecoderConfig, lengths: tuple[int, ...], mesh: DeviceMesh, alone: DeviceMesh, *, pp: int
) -> None:
    """Compare what this rank finds with what it finds alone; where there are tensor ranks, with rows split too."""
    whole = _whole(config, lengths)
    places = whole.placeholders["vision"]
    rows = torch.randn(len(places), config.hidden, generator=torch.Generator().manual_seed(2))
    wanted = _run(config, whole, rows, mesh=alone, axis=TensorAxis.single(), context=ContextAxis.single(), pp=1)
    for split_rows in (False, True)[: 1 + (mesh["tp"].size() > 1)]:
        _compare(config, whole, rows, wanted, mesh, split_rows=split_rows, pp=pp)


def _compare(
    config: DecoderConfig,
    whole: LanguageBatch,
    rows: Tensor,
    wanted: Outcome,
    mesh: DeviceMesh,
    *,
    split_rows: bool,
    pp: int,
) -> None:
    cp, tp = mesh["cp"].size(), mesh["tp"].size()
    axis = TensorAxis.of(mesh["tp"], sequence_parallel=split_rows)
    context = ContextAxis.of(mesh.get_group("cp"))
    places = whole.placeholders["vision"]
    batch, here = _share(whole, context, tp if split_rows else 1)
    taken = batch.placeholders["vision"]
    if axis.splits_rows:
        span = axis.span(len(batch.tokens))
        taken = taken[(taken >= span.start) & (taken < span.stop)]
    mine = torch.searchsorted(places, here[taken])
    found = _run(config, batch, rows[mine], mesh=mesh["tp"], axis=axis, context=context, pp=pp)
    torch.testing.assert_close(found.losses[: len(here)], wanted.losses[here], rtol=1e-6, atol=1e-6)
    assert not found.losses[len(here) :].any()
    assert torch.equal(found.greedy[: len(here)], wanted.greedy[here])
    torch.testing.assert_close(found.rows, wanted.rows[mine], rtol=1e-4, atol=1e-6)
    norm = torch.stack([gradient.norm() for gradient in wanted.gradients.values()]).norm()
    gradients = _joined(found, (cp, tp))
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= 1e-5 * max(gradient.norm(), 1e-3 * norm), (
            name,
            whole.lengths,
            difference,
            gradient.norm(),
        )


def _check_layouts(rank: int, cp: int, tp: int) -> None:
    world = cp * tp
    alone = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(world)][rank]
    mesh = DeviceMesh("cpu", torch.arange(world).view(cp, tp), mesh_dim_names=("cp", "tp"))
    for config in (SMALL, WIDE):
        for lengths in LENGTHS:
            _check_case(config, lengths, mesh, alone, pp=1 + len(lengths) % 2)


@pytest.mark.parametrize(
    ("cp", "tp"),
    [(3, 1), (2, 2), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, 1), (4, 1), (2, 3)))],
)
def test_context_ranks_change_nothing(run_ranks: Callable[..., list[Any]], cp: int, tp: int) -> None:
    """Losses, argmax, the encoders' gradients and every parameter's are within law 1 of one rank's.

    With uneven and empty samples and ranks, over tensor ranks with and without sequence parallelism, with stages,
    with fewer key-value heads than tensor ranks, normed queries and keys, windows and positions in grids.
    """
    run_ranks(cp * tp, _check_layouts, cp, tp)


def _check_share(rank: int) -> None:
    assert dist.group.WORLD is not None
    context = ContextAxis.of(dist.group.WORLD)
    world = dist.get_world_size()
    assert (context.rank, context.size) == (rank, world)
    for counts in ([2, 3, 1], [0, 4, 0], [0, 0, 0]):
        stops = list(accumulate(counts))
        mine = slice(stops[rank] - counts[rank], stops[rank])
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(sum(counts), 2, 3, generator=generator, dtype=torch.float64)
        gradients = torch.randn(world, *whole.shape, generator=generator, dtype=torch.float64)
        x = whole[mine].clone().requires_grad_()
        shared = context.share(x, counts)
        assert torch.equal(shared, whole)
        shared.backward(gradients[rank])
        torch.testing.assert_close(x.grad, gradients.sum(0)[mine], rtol=0, atol=1e-14)


def _check_share_by_collectives(rank: int) -> None:
    vars(context)["by_messages"] = lambda _x: False  # as for tensors on a GPU
    _check_share(rank)


@pytest.mark.parametrize("check", [_check_share, _check_share_by_collectives])
def test_share(run_ranks: Callable[..., list[Any]], check: Callable[[int], None]) -> None:
    """Everybody gets all rows, and of the gradients' sum its own: uneven counts, none; by messages and collectives."""
    run_ranks(3, check)


def test_one_rank_shares_nothing() -> None:
    """Alone, rows are returned themselves."""
    x = torch.empty(3, 2, device="meta")
    assert ContextAxis.single().share(x, [3]) is x
