"""The encoder over tensor ranks, context ranks and stages against itself (design law 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, TypeAlias

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from mimo.model import ProjectorConfig, Stage
from mimo.model.runtime import ContextAxis, Part, TensorAxis, build_part, local
from mimo.topology import Grid, Recompute
from mimo_encoder_audio import WHISPER, WhisperConfig
from mimo_encoder_audio._config import encoded_rows

HIDDEN = 10
SMALL = WhisperConfig(mels=5, width=24, layers=3, heads=6, intermediate=12, positions=24)
STACKED = attrs.evolve(SMALL, stack=2, silence="hear")
CONFIGS = (
    SMALL,
    STACKED,
    attrs.evolve(SMALL, silence="keep", stack=3),
    attrs.evolve(STACKED, silence="skip", projector=ProjectorConfig(kind="resampler", hidden=12, heads=6, queries=3)),
)
RATE = 16_000
CLIPS = (700, 1, 320, 3000, 7680, 321)  # samples
Case: TypeAlias = tuple[WhisperConfig, tuple[int, ...]]
FEW: tuple[Case, ...] = ((STACKED, CLIPS), (SMALL, (640,)))  # the one clip leaves some ranks without a row
EVERYTHING: tuple[Case, ...] = tuple(product(CONFIGS, (CLIPS, (640,), (), (320, 2000), (7680, 1))))


def _sizes(clips: Sequence[int]) -> list[tuple[int, int]]:
    return [(samples, RATE) for samples in clips]


def _items(config: WhisperConfig, clips: Sequence[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(2 * encoded_rows(config, size) + 2, config.mels) for size in _sizes(clips)]
    return [{"mel": torch.randn(shape, generator=generator)} for shape in shapes]


def _stages(
    config: WhisperConfig,
    mesh: DeviceMesh,
    pp: int = 1,
    *,
    frozen: frozenset[str] = frozenset(),
    sequence_parallel: bool = False,
    context: ContextAxis | None = None,
    recompute: Recompute = "none",
    splits_backward: bool = False,
) -> list[Part]:
    axis, context = TensorAxis.of(mesh, sequence_parallel=sequence_parallel), context or ContextAxis.single()
    grid = Grid(name="ear", ranks=range(pp * context.size * axis.size), pp=pp, cp=context.size, tp=axis.size)
    return [
        build_part(
            WHISPER,
            config,
            grid=grid,
            stage=Stage(stage, pp),
            seed=5,
            axis=axis,
            mesh=mesh,
            device=torch.device("cpu"),
            hidden=HIDDEN,
            frozen=frozen,
            context=context,
            recompute=recompute,
            splits_backward=splits_backward,
        )
        for stage in range(pp)
    ]


def _forward(stages: Sequence[Part], config: WhisperConfig, clips: Sequence[int], parts: int = 1) -> Tensor:
    sizes, hidden = _sizes(clips), None
    encoded = sum(encoded_rows(config, size) for size in sizes)
    for stage in stages:
        hidden = stage.encode(_items(config, clips) if stage.stage.is_first else [], sizes, hidden)
        if not stage.stage.is_last:
            assert hidden.shape == (-(-encoded // parts), config.width)
    assert hidden is not None
    return hidden


def _run(stages: Sequence[Part], config: WhisperConfig, clips: Sequence[int], part: int = 0, parts: int = 1) -> Tensor:
    """Return slice ``part`` of the rows, after a backward with the same gradient in whatever slices."""
    hidden = _forward(stages, config, clips, parts)
    total = sum(WHISPER.rows(config, size) for size in _sizes(clips))
    each = -(-total // parts)
    assert hidden.shape == (each, HIDDEN)
    gradient = torch.randn(total, HIDDEN, generator=torch.Generator().manual_seed(1))
    with ExitStack() as stack:
        later = [stack.enter_context(stage.weights_later()) for stage in stages]
        hidden.backward(pad(gradient, (0, 0, 0, parts * each - total))[part * each : (part + 1) * each])
    for compute in later:
        compute()
    return hidden.detach()


def _gradient(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def _equal(pieces: Sequence[Tensor]) -> Tensor:
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def _check_weights(whole: Part, stages: list[Part], cp: int, tp: int) -> None:
    """Compare initial values and gradients, of which each context rank holds a part."""
    norm = torch.stack([_gradient(p).norm() for p in whole.parameters.values() if p.grad is not None]).norm()
    mine = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
    splits = {name: split for stage in stages for name, split in stage.splits.items()}
    assert mine.keys() == whole.parameters.keys()
    everyones: list[dict[str, tuple[Tensor, Tensor | None]]] = [{}] * (cp * tp)
    pairs = {name: (local(one.detach()), None if one.grad is None else _gradient(one)) for name, one in mine.items()}
    dist.all_gather_object(everyones, pairs)
    for name, other in whole.parameters.items():
        dim = splits[name].dim
        values = [each[name][0] for each in everyones[:tp]]
        assert torch.equal(_equal(values) if dim is None else torch.cat(values, dim), local(other)), name
        if other.grad is None:
            assert all(each[name][1] is None for each in everyones), name
            continue
        gradients = [gradient for each in everyones if (gradient := each[name][1]) is not None]
        assert len(gradients) == cp * tp, name  # of ranks without a row too
        parts = [torch.stack(gradients[tensor::tp]).sum(0) for tensor in range(tp)]
        if dim is not None:
            found = torch.cat(parts, dim)
        else:
            found = torch.stack(parts).sum(0) if splits[name].summed else _equal(parts)
        apart = (found - _gradient(other)).norm()
        assert apart <= 1e-5 * max(_gradient(other).norm(), 1e-3 * norm), (name, apart)


def _check_layout(rank: int, pp: int, cp: int, tp: int, cases: Sequence[Case]) -> None:
    world = dist.get_world_size()
    alone = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(world)][rank]
    mesh = DeviceMesh("cpu", torch.arange(world).view(cp, tp), mesh_dim_names=("cp", "tp"))
    context = ContextAxis.of(mesh.get_group("cp"))
    for config, clips in cases:
        (whole,) = _stages(config, alone)
        wanted = _run([whole], config, clips)
        for splits_rows in (False, True)[: min(tp, 2)]:
            stages = _stages(config, mesh["tp"], pp, sequence_parallel=splits_rows, context=context)
            parts, part = (cp * tp, rank) if splits_rows else (cp, context.rank)
            found = _run(stages, config, clips, part, parts)
            here = wanted[part * len(found) :][: len(found)]
            torch.testing.assert_close(found[: len(here)], here, rtol=1e-5, atol=1e-6)
            assert splits_rows == any(stage.summed for stage in stages)
            _check_weights(whole, stages, cp, tp)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(3, 1, 1), (1, 1, 2), (1, 4, 1), (2, 2, 2)])
def test_layout_changes_nothing(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    Over tensor ranks, context ranks and stages, with rows whole and split; with clips cut anywhere, and ranks
    without a row; whatever is dropped and joined at the end.
    """
    run_ranks(cp * tp, _check_layout, pp, cp, tp, FEW)


@pytest.mark.soak
@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (1, 6), (2, 1), (3, 1), (5, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_layout_changes_nothing(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """The same in all."""
    run_ranks(cp * tp, _check_layout, pp, cp, tp, EVERYTHING)


def _check_ways(_rank: int, cp: int, tp: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(cp, tp), mesh_dim_names=("cp", "tp"))
    context, parts = ContextAxis.of(mesh.get_group("cp")), cp * tp
    for config in (STACKED,):
        for clips in (CLIPS, ()):
            usual = _stages(config, mesh["tp"], 2, sequence_parallel=tp > 1, context=context)
            rows = _run(usual, config, clips, dist.get_rank(), parts)
            wanted = {name: p.grad for part in usual for name, p in part.parameters.items()}
            ways: tuple[Recompute, ...] = ("selective", "full")
            for way in ways:
                stages = _stages(
                    config,
                    mesh["tp"],
                    2,
                    sequence_parallel=tp > 1,
                    context=context,
                    recompute=way,
                    splits_backward=True,
                )
                assert torch.equal(_run(stages, config, clips, dist.get_rank(), parts), rows)
                for name, parameter in (pair for part in stages for pair in part.parameters.items()):
                    other = wanted[name]
                    assert (other is None) == (parameter.grad is None), name
                    if isinstance(other, DTensor):
                        assert torch.equal(_gradient(parameter), other.to_local()), (way, name)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 2)])
def test_recomputing_and_splitting_change_no_bit(run_ranks: Callable[..., list[Any]], cp: int, tp: int) -> None:
    """One microbatch has the gradients that it has without either, on all ranks, those without rows too."""
    run_ranks(cp * tp, _check_ways, cp, tp)


def _check_frozen(_rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    (part,) = _stages(SMALL, mesh, frozen=frozenset({"encoder"}))
    _run([part], SMALL, CLIPS)
    for name, parameter in part.parameters.items():
        assert (parameter.grad is not None) == name.startswith("ear.projector."), name
    (part,) = _stages(SMALL, mesh, frozen=frozenset({"encoder", "projector"}))
    assert not _forward([part], SMALL, CLIPS).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_alone(_rank: int) -> None:
    for config in CONFIGS:
        (part,) = _stages(config, DeviceMesh("cpu", [0], mesh_dim_names=("tp",)))
        items, sizes = _items(config, CLIPS), _sizes(CLIPS)
        together = part.encode(items, sizes)
        alone = torch.cat([part.encode([item], [size]) for item, size in zip(items, sizes, strict=True)])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
        turned = part.encode([{"mel": items[3]["mel"].flip(0)}], sizes[3:4])
        first = sum(WHISPER.rows(config, size) for size in sizes[:3])
        assert not torch.allclose(turned, together[first : first + len(turned)])
        assert part.encode([], []).shape == (0, HIDDEN)


def test_clips_do_not_hear_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """A clip's rows are the same alone and among others, and depend on when in it things sound."""
    run_ranks(1, _check_alone)


def _check_precision(_rank: int) -> None:
    module = WHISPER.build(SMALL, HIDDEN)
    wanted = module(_items(SMALL, CLIPS), _sizes(CLIPS))
    for dtype in (torch.bfloat16, torch.float16):
        rows = module.to(dtype)(_items(SMALL, CLIPS), _sizes(CLIPS))
        assert rows.dtype == dtype == module([], []).dtype
        assert float((rows.float() - wanted).detach().norm() / wanted.detach().norm()) < 2e-2


def test_rows_in_reduced_precision_are_near_those_in_full(run_ranks: Callable[..., list[Any]]) -> None:
    """Within two hundredths, of the type of the weights, and no clip is no rows of it."""
    run_ranks(1, _check_precision)
