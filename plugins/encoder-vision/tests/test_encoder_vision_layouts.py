"""The encoder against one written out here, and over tensor ranks and stages against itself (design law 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from mimo.model import EncoderSpec, ProjectorConfig, Stage
from mimo.model.runtime import ContextAxis, Part, TensorAxis, build_part, local
from mimo.topology import Grid
from mimo_encoder_vision import CLIP, SIGLIP, VIT, ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._grids import grids_of, packed_rows_of

HIDDEN = 10
SMALL = VitConfig(patch=2, channels=3, width=24, layers=3, heads=6, intermediate=11)
SIZES = ((4, 4), (2, 6), (4, 4), (8, 2), (2, 2))
_SHARED: dict[str, Any] = {"patch": 2, "width": 12, "layers": 3, "heads": 6, "intermediate": 11}
_RESAMPLER = ProjectorConfig(kind="resampler", hidden=12, heads=6, queries=3, layers=1, norm="layer")
FAMILIES: dict[str, tuple[EncoderSpec, VisionConfig]] = {
    "vit": (VIT, SMALL),
    "native, joined, resized positions": (
        SIGLIP,
        SiglipConfig(
            **_SHARED, mode="native", table=3, resize_positions="bilinear", projector=ProjectorConfig(shuffle=2)
        ),
    ),
    "native, enlarged, resampled": (
        SIGLIP,
        SiglipConfig(**_SHARED, mode="native", size=6, max_patches=9, enlarge=True, projector=_RESAMPLER),
    ),
    "tiles, joined": (
        CLIP,
        ClipConfig(**_SHARED, mode="tiles", size=4, max_tiles=3, projector=ProjectorConfig(kind="linear", shuffle=2)),
    ),
    "class token kept, a layer left": (
        CLIP,
        ClipConfig(**_SHARED, size=6, keep_class_token=True, feature_layer=-2, final_norm=False),
    ),
    "tiles, class token seen, resampled": (
        CLIP,
        ClipConfig(**_SHARED, mode="tiles", size=4, max_tiles=4, keep_class_token=True, projector=_RESAMPLER),
    ),
}


def _items(config: VisionConfig, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    items = []
    for size in sizes:
        grids, side = grids_of(config, size), config.patch
        shape = (len(grids), config.channels, grids[0][0] * side, grids[0][1] * side)
        items.append({"pixels": torch.randn(shape, generator=generator)})
    return items


def _stages(
    spec: EncoderSpec,
    config: VisionConfig,
    mesh: DeviceMesh,
    pp: int = 1,
    frozen: frozenset[str] = frozenset(),
    *,
    sequence_parallel: bool = False,
    context: ContextAxis | None = None,
) -> list[Part]:
    axis, context = TensorAxis.of(mesh, sequence_parallel=sequence_parallel), context or ContextAxis.single()
    grid = Grid(name="eye", ranks=range(pp * context.size * axis.size), pp=pp, cp=context.size, tp=axis.size)
    return [
        build_part(
            spec,
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
        )
        for stage in range(pp)
    ]


def _reference(config: VitConfig, weights: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """One image's rows, patch by patch and head by head."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, x: Tensor) -> Tensor:
        standard = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return standard * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def mlp(name: str, x: Tensor) -> Tensor:
        middle = linear(f"{name}.up", x)
        return linear(f"{name}.down", middle * 0.5 * (1 + torch.erf(middle / math.sqrt(2))))

    side, quarter = config.patch, config.width // 4
    rows = []
    for down in range(pixels.shape[1] // side):
        for across in range(pixels.shape[2] // side):
            patch = pixels[:, down * side : (down + 1) * side, across * side : (across + 1) * side]
            position = [
                wave(place / 10000 ** (i / quarter))
                for place in (down, across)
                for wave in (math.sin, math.cos)
                for i in range(quarter)
            ]
            rows.append(linear("patch", patch.permute(1, 2, 0).reshape(-1)) + torch.tensor(position))
    x = torch.stack(rows)
    width = config.width // config.heads
    for layer in range(config.layers):
        path = f"layers.{layer}"
        y = norm(f"{path}.attention_norm", x)
        query, key, value = (linear(f"{path}.attention.{name}", y) for name in ("query", "key", "value"))
        heads = []
        for head in range(config.heads):
            mine = slice(head * width, (head + 1) * width)
            heads.append((query[:, mine] @ key[:, mine].T / math.sqrt(width)).softmax(-1) @ value[:, mine])
        x = x + linear(f"{path}.attention.output", torch.cat(heads, -1))
        x = x + mlp(f"{path}.mlp", norm(f"{path}.mlp_norm", x))
    return mlp("projector.mlp", norm("norm", x))


def _gradient(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def _check_reference(_rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    for config in (SMALL, attrs.evolve(SMALL, channels=1, projector=ProjectorConfig(hidden=7), heads=2)):
        (part,) = _stages(VIT, config, mesh)
        with torch.no_grad():  # biases start at zero and norms at one, where a mistake would not show
            for index, parameter in enumerate(part.module.parameters()):
                piece = local(parameter)
                piece.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(index)) * 0.3 + 0.1)
        weights = {
            name.removeprefix("eye."): local(parameter.detach()).clone().requires_grad_()
            for name, parameter in part.parameters.items()
        }
        items = _items(config, SIZES)
        found = part.encode(items, SIZES)
        wanted = torch.cat([_reference(config, weights, item["pixels"][0]) for item in items])
        assert len(found) == sum(VIT.rows(config, size) for size in SIZES)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        found.backward(gradient)
        wanted.backward(gradient)
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        assert gradients.keys() == weights.keys()
        whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, wanted_gradient in gradients.items():
            apart = (_gradient(part.parameters[f"eye.{name}"]) - wanted_gradient).norm()
            assert apart <= 1e-5 * max(wanted_gradient.norm(), 1e-3 * whole), name


def test_equals_an_encoder_written_out(run_ranks: Callable[..., list[Any]]) -> None:
    """Rows and every gradient are those of the formulas image by image."""
    run_ranks(1, _check_reference)


def _run(stages: list[Part], family: str, sizes: Sequence[tuple[int, int]], part: int = 0, parts: int = 1) -> Tensor:
    """Return slice ``part`` of the rows, after a backward with the same gradient in whatever slices."""
    spec, config = FAMILIES[family]
    total = sum(spec.rows(config, size) for size in sizes)
    inside = sum(packed_rows_of(config, size) for size in sizes)
    each = -(-total // parts)
    items, hidden = _items(config, sizes), None
    for stage in stages:
        hidden = stage.encode(items if stage.stage.is_first else [], sizes, hidden)
        last = stage.stage.is_last
        assert hidden.shape == ((each, HIDDEN) if last else (-(-inside // parts), config.width))
    assert hidden is not None
    gradient = torch.randn(total, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden.backward(pad(gradient, (0, 0, 0, parts * each - total))[part * each : (part + 1) * each])
    return hidden.detach()


def _equal(pieces: Sequence[Tensor]) -> Tensor:
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def _check_weights(whole: Part, stages: list[Part], cp: int, tp: int) -> None:
    """Compare initial values and gradients, of which each context rank holds a part."""
    norm = torch.stack([_gradient(p).norm() for p in whole.parameters.values() if p.grad is not None]).norm()
    mine = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
    splits = {name: split for stage in stages for name, split in stage.splits.items()}
    assert mine.keys() == whole.parameters.keys()
    everyones: list[dict[str, tuple[Tensor, Tensor]]] = [{}] * (cp * tp)
    pairs = {name: (local(one.detach()), _gradient(one)) for name, one in mine.items() if one.grad is not None}
    dist.all_gather_object(everyones, pairs)
    for name, other in whole.parameters.items():
        if other.grad is None:
            assert name not in pairs
            continue
        dim = splits[name].dim
        values = [each[name][0] for each in everyones[:tp]]
        assert torch.equal(_equal(values) if dim is None else torch.cat(values, dim), local(other)), name
        parts = [torch.stack([each[name][1] for each in everyones[tensor::tp]]).sum(0) for tensor in range(tp)]
        if dim is not None:
            found = torch.cat(parts, dim)
        else:
            found = torch.stack(parts).sum(0) if splits[name].summed else _equal(parts)
        apart = (found - _gradient(other)).norm()
        assert apart <= 1e-5 * max(_gradient(other).norm(), 1e-3 * norm), (name, apart)


def _check_layout(
    rank: int, pp: int, cp: int, tp: int, families: Sequence[str], everything: Sequence[Sequence[tuple[int, int]]]
) -> None:
    world = dist.get_world_size()
    alone = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(world)][rank]
    mesh = DeviceMesh("cpu", torch.arange(world).view(cp, tp), mesh_dim_names=("cp", "tp"))
    context = ContextAxis.of(mesh.get_group("cp"))
    for family, sizes in product(families, everything):
        (whole,) = _stages(*FAMILIES[family], alone)
        wanted = _run([whole], family, sizes)
        for splits_rows in (False, True)[: min(tp, 2)]:
            stages = _stages(*FAMILIES[family], mesh["tp"], pp, sequence_parallel=splits_rows, context=context)
            parts, part = (cp * tp, rank) if splits_rows else (cp, context.rank)
            found = _run(stages, family, sizes, part, parts)
            here = wanted[part * len(found) :][: len(found)]
            torch.testing.assert_close(found[: len(here)], here, rtol=1e-5, atol=1e-6)
            assert splits_rows == any(stage.summed for stage in stages)
            _check_weights(whole, stages, cp, tp)


EVERYTHING = (SIZES, ((2, 2),), ((2, 6), (2, 2)), (), ((12, 14), (4, 4)))


@pytest.mark.parametrize(("pp", "cp", "tp"), [(2, 1, 1), (3, 1, 1), (2, 1, 2), (1, 1, 3), (1, 1, 6)])
def test_layout_changes_nothing(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    Over tensor ranks and stages, with rows whole and split (sequence parallelism); with images cut anywhere, with ranks
    without a row, and without an image at all.
    """
    run_ranks(cp * tp, _check_layout, pp, cp, tp, ["vit"], EVERYTHING)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(1, 2, 1), (2, 3, 1), (1, 4, 1), (2, 2, 2), (1, 2, 3)])
def test_context_ranks_change_nothing(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """The same over context ranks, and tensor ranks inside of them."""
    run_ranks(cp * tp, _check_layout, pp, cp, tp, ["vit"], EVERYTHING)


FIVE = ((5, 9), (3, 4), (12, 5), (4, 4), (1, 1))


@pytest.mark.parametrize(("pp", "cp", "tp"), [(2, 1, 2), (1, 3, 1)])
def test_layout_changes_no_family(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """The same for class tokens, joined patches, tiles, resampled and native images: five of them, and none."""
    run_ranks(cp * tp, _check_layout, pp, cp, tp, [name for name in FAMILIES if name != "vit"], (FIVE, ()))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("pp", "cp", "tp"), [(2, 2, 2), (1, 1, 3), (3, 2, 1), (1, 1, 6), (2, 1, 3), (1, 4, 1), (1, 3, 2)]
)
def test_more_layouts_change_no_family(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int) -> None:
    """One to four images too."""
    sizes = (FIVE, FIVE[1:2], FIVE[:2], FIVE[2:], FIVE[:4], ((40, 3), (1, 1)), ())
    run_ranks(cp * tp, _check_layout, pp, cp, tp, list(FAMILIES), sizes)


def _check_frozen(_rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    (part,) = _stages(VIT, SMALL, mesh, frozen=frozenset({"encoder"}))
    _run([part], "vit", SIZES)
    for name, parameter in part.parameters.items():
        assert (parameter.grad is not None) == name.startswith("eye.projector."), name
    (part,) = _stages(VIT, SMALL, mesh, frozen=frozenset({"encoder", "projector"}))
    assert not part.encode(_items(SMALL, SIZES), SIZES).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_alone(_rank: int) -> None:
    (part,) = _stages(VIT, SMALL, DeviceMesh("cpu", [0], mesh_dim_names=("tp",)))
    items = _items(SMALL, SIZES)
    together = part.encode(items, SIZES)
    one_by_one = torch.cat([part.encode([item], [size]) for item, size in zip(items, SIZES, strict=True)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    turned = items[0]["pixels"].flip(3)
    assert not torch.allclose(part.encode([{"pixels": turned}], SIZES[:1]), together[:4])


def test_images_do_not_see_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """An image's rows are the same alone and among others, and depend on where in it things are."""
    run_ranks(1, _check_alone)
