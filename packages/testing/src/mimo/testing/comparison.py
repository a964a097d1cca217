"""Ours beside a published model: weights of which each matters, its folder, and gradients by the names of weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-4
"""How far apart rows and gradients may be, relative to their length."""

NEMOTRON: Mapping[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "ssm_state_size": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 4,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 10,
}
"""Layers of a small Nemotron-H with one of each kind, as its ``config.json`` says them."""


@torch.no_grad()
def draw(tensors: Iterable[Tensor], *, seed: int = 1) -> None:
    """Give tensors, those that start at zero or one too, values with which a mistake shows."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + 0.1)


@torch.no_grad()
def put_gradients(tensors: Iterable[Tensor]) -> None:
    """Put each gradient in its parameter's place, so that it goes by the same names; NaN where nothing trains it."""
    for tensor in tensors:
        tensor.copy_(torch.full_like(tensor, nan) if tensor.grad is None else tensor.grad)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a published folder."""
    from safetensors.torch import load_file  # comes with `transformers`, which not every test needs

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model of `transformers` as its published folder names them."""
    model.save_pretrained(folder)
    return tensors_of(folder)


@torch.no_grad()
def check_rows(found: Tensor, expected: Tensor) -> None:
    """Refuse rows that differ."""
    assert found.shape == expected.shape
    assert float((found - expected).norm()) <= NEAR * float(expected.norm())


@torch.no_grad()
def check_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, idle: Collection[str] = ()) -> None:
    """Refuse gradients that differ, or any that is missing; one that is next to nothing counts beside all of them.

    Args:
        found: by name, of `put_gradients`.
        expected: likewise.
        idle: patterns of names that nothing trains, neither here nor there.
    """
    assert found.keys() == expected.keys()
    still = {name for name in expected if any(fnmatchcase(name, pattern) for pattern in idle)}
    for name in still:
        assert torch.stack([found[name], expected[name]]).isnan().all(), name
    trained = {name: gradient for name, gradient in expected.items() if name not in still}
    whole = float(torch.stack([gradient.norm() for gradient in trained.values()]).norm())
    assert isfinite(whole), [name for name, gradient in trained.items() if not gradient.isfinite().all()]
    for name, gradient in trained.items():
        distance, size = float((found[name] - gradient).norm()), float(gradient.norm())
        assert distance <= NEAR * max(size, 1e-3 * whole), (name, distance, size)
