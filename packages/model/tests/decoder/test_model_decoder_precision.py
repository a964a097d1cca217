"""The decoder in bf16 and fp16: losses near those of fp32; splitting and recomputing change nothing.

Here parameters are of the reduced type themselves, as those are that an optimizer plugin gathers for the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, DecoderConfig
from mimo.model.runtime import NO_LABEL, LanguageBatch, Part, TensorAxis, build_part, gradient_of
from mimo.topology import Grid, Recompute

HALVES = (torch.bfloat16, torch.float16)
DENSE = DecoderConfig(vocabulary=101, hidden=64, layers=3, heads=4, kv_heads=2, intermediate=96)
EXPERTS = attrs.evolve(
    DENSE, experts=4, shared_intermediate=24, dense_layers=1, expert_bias_rate=0.01, balance_loss=0.1, z_loss=0.1
)
CONFIGS = {
    "dense": DENSE,
    "tied, biases": attrs.evolve(DENSE, tied=True, attention_bias=True, mlp_bias=True, query_key_norm=True),
    "experts": EXPERTS,
    "sigmoid": attrs.evolve(EXPERTS, router_score="sigmoid", experts_per_token=3, expert_intermediate=21),
}
ROWS = 48


def _build(
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    recompute: Recompute = "none",
    splits_backward: bool = False,
    axis: TensorAxis | None = None,
    mesh: DeviceMesh | None = None,
) -> Part:
    axis = axis or TensorAxis.single()
    return build_part(
        DECODER,
        config,
        grid=Grid(name="language", ranks=range(axis.size), tp=axis.size),
        seed=1,
        axis=axis,
        mesh=mesh or DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        expert_mesh=None if mesh else DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")),
        device=torch.device("cpu"),
        dtype=dtype,
        recompute=recompute,
        splits_backward=splits_backward,
    )


def _train(part: Part, dtype: torch.dtype) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the sum of all losses of a microbatch, the losses of its rows, and gradients, those of its rows too."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(101, (ROWS,), generator=generator)
    labels = tokens.roll(-1)
    labels[[3, 25, 44, 45, 46, 47]] = NO_LABEL
    lengths = (26, 0, 19)
    batch = LanguageBatch.of(
        tokens, labels, torch.arange(ROWS), lengths=lengths, placeholders={"vision": torch.tensor([1, 2, 30])}
    )
    rows = torch.randn(3, 64, generator=generator).to(dtype).requires_grad_()
    hidden = part.language(batch, {"vision": rows}, None)
    losses = part.language.losses(hidden, batch.labels)
    assert hidden.dtype == dtype
    assert losses.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in batch.aux_losses.losses.values())
    whole = losses.sum() + sum(batch.aux_losses.losses.values())
    with part.defer_weight_grads() as later:
        whole.backward()
    later()
    assert rows.grad is not None
    gradients = {
        name: gradient for name, value in part.parameters.items() if (gradient := gradient_of(value)) is not None
    }
    return float(whole.detach()), losses.detach(), {**gradients, "rows": rows.grad}


def _check_near(_rank: int, name: str, dtype: torch.dtype) -> None:
    whole, losses, gradients = _train(_build(CONFIGS[name], torch.float32), torch.float32)
    found, found_losses, found_gradients = _train(_build(CONFIGS[name], dtype), dtype)
    assert math.isclose(found, whole, rel_tol=1e-2)
    assert math.isclose(float(found_losses.sum()), float(losses.sum()), rel_tol=1e-2)
    assert found_gradients.keys() == gradients.keys()
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for path, gradient in found_gradients.items():
        assert gradient.dtype == dtype, path
        assert gradient.isfinite().all(), path
        if "experts" not in name and "router" not in path:
            error = (gradient.float() - gradients[path]).norm()
            assert error <= 5e-2 * max(float(gradients[path].norm()), 1e-2 * float(total)), (path, error)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_in_reduced_precision_are_near_those_in_full(
    name: str, dtype: torch.dtype, run_ranks: Callable[..., list[Any]]
) -> None:
    """Within a hundredth; losses are of fp32, gradients finite and of the type of their parameters."""
    run_ranks(1, _check_near, name, dtype)


def _check_same(_rank: int, name: str) -> None:
    loss, _, gradients = _train(_build(CONFIGS[name], torch.bfloat16), torch.bfloat16)
    ways: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in ways:
        for splits_backward in (False, True):
            part = _build(CONFIGS[name], torch.bfloat16, recompute=recompute, splits_backward=splits_backward)
            found, _, ours = _train(part, torch.bfloat16)
            assert found == loss
            assert ours.keys() == gradients.keys()
            for path, gradient in gradients.items():
                # The two gradients of a tied embedding are added in one rounding, or in two.
                tied = CONFIGS[name].tied and splits_backward and path == "language.embedding.weight"
                bound = 2**-7 * float(gradient.abs().max()) if tied else 0.0
                assert float((ours[path] - gradient).abs().max()) <= bound, (recompute, splits_backward, path)


@pytest.mark.parametrize("name", CONFIGS)
def test_split_and_repeated_backwards_are_those_of_bf16(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Deferred weight gradients, and what is computed again, are the same to the bit."""
    run_ranks(1, _check_same, name)


def _check_tensor_ranks(_rank: int, sequence_parallel: bool) -> tuple[float, bool]:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    axis = TensorAxis.of(mesh, sequence_parallel=sequence_parallel)
    part = _build(attrs.evolve(DENSE, tied=True), torch.bfloat16, axis=axis, mesh=mesh)
    tokens = torch.randint(101, (ROWS,), generator=torch.Generator().manual_seed(3))
    batch = LanguageBatch.of(tokens, tokens.roll(-1), torch.arange(ROWS), lengths=(30, 18))
    loss = part.language.losses(part.language(batch, {}, None), batch.labels).sum()
    loss.backward()
    gradients = [gradient for value in part.parameters.values() if (gradient := gradient_of(value)) is not None]
    return float(loss.detach()), all(gradient.isfinite().all() for gradient in gradients)


def _check_alone(_rank: int) -> float:
    part = _build(attrs.evolve(DENSE, tied=True), torch.float32)
    tokens = torch.randint(101, (ROWS,), generator=torch.Generator().manual_seed(3))
    batch = LanguageBatch.of(tokens, tokens.roll(-1), torch.arange(ROWS), lengths=(30, 18))
    return float(part.language.losses(part.language(batch, {}, None), batch.labels).sum().detach())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_in_bf16_are_near_one_rank_in_fp32(
    sequence_parallel: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Sums over ranks are in bf16 too; the loss is the same on both."""
    (alone,) = run_ranks(1, _check_alone)
    (one, finite), (other, also) = run_ranks(2, _check_tensor_ranks, sequence_parallel)
    assert one == other
    assert finite
    assert also
    assert math.isclose(one, alone, rel_tol=1e-2)
