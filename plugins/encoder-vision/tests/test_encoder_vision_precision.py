"""The encoder in bf16 and fp16: rows near those of fp32; splitting and recomputing change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model.runtime import Part, TensorAxis, build_part, gradient_of
from mimo.topology import Grid, Recompute
from mimo_encoder_vision import VIT, VitConfig

HIDDEN = 20
CONFIG = VitConfig(patch=2, channels=3, width=48, layers=3, heads=4, intermediate=96)
SIZES = ((4, 4), (2, 6), (8, 2))


def _build(dtype: torch.dtype, *, recompute: Recompute = "none", splits_backward: bool = False) -> Part:
    return build_part(
        VIT,
        CONFIG,
        grid=Grid(name="eye", ranks=(0,)),
        seed=5,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        dtype=dtype,
        hidden=HIDDEN,
        recompute=recompute,
        splits_backward=splits_backward,
    )


def _run(part: Part, sizes: tuple[tuple[int, int], ...] = SIZES) -> tuple[Tensor, dict[str, Tensor]]:
    """Return rows and gradients; pictures are prepared in fp32, whatever the encoder computes in."""
    generator = torch.Generator().manual_seed(4)
    items = [{"pixels": torch.rand(1, 3, *size, generator=generator) * 2 - 1} for size in sizes]
    rows = part.encode(items, sizes)
    with part.defer_weight_grads() as later:
        rows.backward(torch.randn(rows.shape, generator=generator).to(rows.dtype))
    later()
    return rows.detach(), {
        path: gradient for path, one in part.parameters.items() if (gradient := gradient_of(one)) is not None
    }


def _check(_rank: int, dtype: torch.dtype) -> None:
    wanted, gradients = _run(_build(torch.float32))
    rows, found = _run(_build(dtype))
    assert rows.dtype == dtype
    assert float((rows.float() - wanted).norm() / wanted.norm()) < 1e-2
    assert found.keys() == gradients.keys()
    for path, gradient in found.items():
        assert gradient.dtype == dtype
        assert gradient.isfinite().all(), path
        assert float((gradient.float() - gradients[path]).norm()) < 5e-2 * float(gradients[path].norm()), path
    ways: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in ways:
        for splits_backward in (False, True):
            same, others = _run(_build(dtype, recompute=recompute, splits_backward=splits_backward))
            assert torch.equal(same, rows)
            assert all(torch.equal(others[path], gradient) for path, gradient in found.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_reduced_precision_are_near_those_in_full(
    dtype: torch.dtype, run_ranks: Callable[..., list[Any]]
) -> None:
    """Within a hundredth; a split or repeated backward gives the same gradients to the bit."""
    run_ranks(1, _check, dtype)


def _check_nothing(_rank: int) -> None:
    rows, gradients = _run(_build(torch.bfloat16), ())
    assert rows.shape == (0, HIDDEN)
    assert rows.dtype == torch.bfloat16
    assert not any(gradient.any() for gradient in gradients.values())


def test_no_picture_is_no_rows_in_reduced_precision_too(run_ranks: Callable[..., list[Any]]) -> None:
    """They are of the type of all others."""
    run_ranks(1, _check_nothing)
