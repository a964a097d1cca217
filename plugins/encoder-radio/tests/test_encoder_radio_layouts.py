"""The encoder over tensor, context and pipeline ranks against itself on one (design law 1), and recomputed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from mimo.model import ProjectorConfig, Stage
from mimo.model.runtime import ContextAxis, Part, TensorAxis, build_part, local
from mimo.topology import Grid, Recompute
from mimo_encoder_radio import RADIO, RadioConfig

HIDDEN = 10
Sizes = Sequence[tuple[int, int]]
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
FREE = ("key.bias",)
"""Parameters whose true gradient is zero."""


def _config(projector: ProjectorConfig | None = None, **changes: Any) -> RadioConfig:
    values = {"patch": 2, "width": 24, "layers": 3, "heads": 6, "intermediate": 12, "positions": 3, "registers": 2}
    return RadioConfig(**{**values, "projector": projector or ProjectorConfig(), **changes})


CONFIGS = {
    "shuffled": _config(ProjectorConfig(hidden=12, shuffle=2, norm="rms", activation="squared_relu", bias=False)),
    "dropped": _config(),
    "kept": _config(ProjectorConfig(norm="layer"), keep=(0, 3)),
    "tiles": _config(ProjectorConfig(kind="linear", shuffle=2), mode="tiles", size=4, max_tiles=3),
    "queries": _config(ProjectorConfig(kind="resampler", hidden=12, queries=3, heads=6), keep=(1,)),
}
EVERYTHING: tuple[Sizes, ...] = (((4, 4), (2, 6), (4, 4), (8, 3), (1, 1)), ((2, 2),), (), ((12, 14), (4, 20)))
"""No image, few rows for many ranks, images of one size and of others, larger and smaller than the positions."""


def _stages(
    config: RadioConfig,
    mesh: DeviceMesh,
    pp: int = 1,
    *,
    frozen: frozenset[str] = frozenset(),
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    splits_backward: bool = False,
) -> list[Part]:
    context = ContextAxis.of(mesh.get_group("cp"))
    axis = TensorAxis.of(mesh["tp"], sequence_parallel=sequence_parallel)
    grid = Grid(name="eye", ranks=range(pp * mesh.size()), pp=pp, cp=context.size, tp=axis.size)
    return [
        build_part(
            RADIO,
            config,
            grid=grid,
            stage=Stage(stage, pp),
            seed=5,
            axis=axis,
            mesh=mesh["tp"],
            device=torch.device("cpu"),
            hidden=HIDDEN,
            frozen=frozen,
            context=context,
            recompute=recompute,
            splits_backward=splits_backward,
        )
        for stage in range(pp)
    ]


def _mesh(cp: int, tp: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(cp * tp).view(cp, tp), mesh_dim_names=("cp", "tp"))


def _alone() -> DeviceMesh:
    world = range(dist.get_world_size())
    meshes = [DeviceMesh("cpu", [[rank]], mesh_dim_names=("cp", "tp")) for rank in world]
    groups = [(mesh.get_group("cp"), mesh["tp"]) for mesh in meshes if mesh.get_coordinate()]
    assert len(groups) == 1
    return meshes[dist.get_rank()]


def _image(size: tuple[int, int]) -> Image.Image:
    values = random.Random(str(size))
    return Image.frombytes("RGB", size[::-1], bytes(values.randrange(256) for _ in range(3 * size[0] * size[1])))


def _run(stages: list[Part], config: RadioConfig, sizes: Sizes, part: int = 0, parts: int = 1) -> Tensor:
    """Return slice ``part`` of the rows, after a backward with the same gradient in whatever slices."""
    total = sum(RADIO.rows(config, size) for size in sizes)
    sent = sum(RADIO.stages.message_rows(config, size) for size in sizes) if RADIO.stages else 0
    items, hidden = [RADIO.prepare(config, _image(size)) for size in sizes], None
    for stage in stages:
        hidden = stage.encode(items if stage.stage.is_first else [], sizes, hidden)
        rows, width = (total, HIDDEN) if stage.stage.is_last else (sent, config.width)
        assert hidden.shape == (-(-rows // parts), width)
    assert hidden is not None
    each = len(hidden)
    gradient = torch.randn(total, HIDDEN, generator=torch.Generator().manual_seed(1))
    with stages[-1].weights_later() as later:
        hidden.backward(pad(gradient, (0, 0, 0, parts * each - total))[part * each : (part + 1) * each])
    later()
    return hidden.detach()


def _gradient(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def _equal(pieces: Sequence[Tensor]) -> Tensor:
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def _check_weights(whole: Part, stages: list[Part], cp: int, tp: int) -> None:
    """Compare initial values and gradients, of which each context rank holds a part."""
    norm = torch.stack([_gradient(parameter).norm() for parameter in whole.parameters.values()]).norm()
    mine = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
    splits = {name: split for stage in stages for name, split in stage.splits.items()}
    assert mine.keys() == whole.parameters.keys()
    everyones: list[dict[str, tuple[Tensor, Tensor]]] = [{}] * (cp * tp)
    dist.all_gather_object(everyones, {name: (local(one.detach()), _gradient(one)) for name, one in mine.items()})
    for name, other in whole.parameters.items():
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
        assert name.endswith(FREE) or bool(_gradient(other).any()) or not norm, name


def _check_layout(_rank: int, pp: int, cp: int, tp: int, config: RadioConfig) -> None:
    alone, mesh = _alone(), _mesh(cp, tp)
    for sizes in EVERYTHING:
        (whole,) = _stages(config, alone)
        wanted = _run([whole], config, sizes)
        for splits_rows in (False, True)[: min(tp, 2)]:
            stages = _stages(config, mesh, pp, sequence_parallel=splits_rows)
            context, tensor = mesh.get_local_rank("cp"), mesh.get_local_rank("tp")
            parts, part = (cp * tp, context * tp + tensor) if splits_rows else (cp, context)
            found = _run(stages, config, sizes, part, parts)
            here = wanted[part * len(found) :][: len(found)]
            torch.testing.assert_close(found[: len(here)], here, rtol=1e-5, atol=1e-6)
            _check_weights(whole, stages, cp, tp)


LAYOUTS = {(2, 2, 2): "shuffled", (3, 1, 1): "dropped", (2, 3, 1): "kept", (2, 1, 2): "tiles", (1, 1, 3): "queries"}
"""Of stages, context ranks and tensor ranks, with the settings that are always run on them."""
CASES = [
    pytest.param(*layout, name, marks=() if LAYOUTS[layout] == name else pytest.mark.soak)
    for layout in LAYOUTS
    for name in CONFIGS
]


@pytest.mark.parametrize(("pp", "cp", "tp", "name"), CASES)
def test_layout_changes_nothing(run_ranks: Callable[..., list[Any]], pp: int, cp: int, tp: int, name: str) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    With rows whole and split (sequence parallelism), images cut anywhere, ranks without a row, and no image at all;
    class tokens dropped and kept, patches joined, tiles, and learned queries.
    """
    run_ranks(cp * tp, _check_layout, pp, cp, tp, CONFIGS[name])


def _check_ways(_rank: int, cp: int, tp: int, sequence_parallel: bool) -> None:
    mesh, config = _mesh(cp, tp), CONFIGS["shuffled"]
    for sizes in EVERYTHING[::2]:
        found = []
        for way in WAYS:
            for splits_backward in (False, True):
                stages = _stages(
                    config,
                    mesh,
                    sequence_parallel=sequence_parallel,
                    recompute=way,
                    splits_backward=splits_backward,
                )
                rows = sum(RADIO.rows(config, size) for size in sizes)
                parts = cp * (tp if sequence_parallel else 1)
                part = dist.get_rank() if sequence_parallel else mesh.get_local_rank("cp")
                output = _run(stages, config, sizes, part, parts)
                assert len(output) == -(-rows // parts)
                found.append({name: _gradient(one) for name, one in stages[0].parameters.items()} | {"rows": output})
        for other in found[1:]:
            assert all(torch.equal(value, found[0][name]) for name, value in other.items())


@pytest.mark.parametrize(("cp", "tp", "sequence_parallel"), [(1, 1, False), (1, 2, True), (2, 1, False)])
def test_recomputing_and_splitting_change_no_bit(
    run_ranks: Callable[..., list[Any]], cp: int, tp: int, sequence_parallel: bool
) -> None:
    """On all ranks, those without rows too, one microbatch has the gradients that it has without either."""
    run_ranks(cp * tp, _check_ways, cp, tp, sequence_parallel)


def _check_frozen(_rank: int) -> None:
    config, sizes = CONFIGS["shuffled"], EVERYTHING[0]
    (part,) = _stages(config, _mesh(1, 1), frozen=frozenset({"encoder"}))
    _run([part], config, sizes)
    for name, parameter in part.parameters.items():
        assert (parameter.grad is not None) == name.startswith("eye.projector."), name
    (part,) = _stages(config, _mesh(1, 1), frozen=frozenset({"encoder", "projector"}))
    assert not part.encode([RADIO.prepare(config, _image(size)) for size in sizes], sizes).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_others(_rank: int) -> None:
    config, sizes = CONFIGS["kept"], EVERYTHING[0]
    (part,) = _stages(config, _mesh(1, 1))
    items = [RADIO.prepare(config, _image(size)) for size in sizes]
    together = part.encode(items, sizes)
    one_by_one = torch.cat([part.encode([item], [size]) for item, size in zip(items, sizes, strict=True)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    turned = items[0]["pixels"].flip(3)
    assert not torch.allclose(part.encode([{"pixels": turned}], sizes[:1])[:2], together[:2])
    for dtype in (torch.bfloat16, torch.float16):
        part.module.to(dtype)
        rows = part.encode(items, sizes)
        assert rows.dtype == dtype
        assert float((rows.float() - together).norm()) < 2e-2 * float(together.norm())


def test_images_do_not_see_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """An image's rows are the same alone and among others; class tokens see it; half precision comes near."""
    run_ranks(1, _check_others)
