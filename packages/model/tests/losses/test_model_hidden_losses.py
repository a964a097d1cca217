"""Losses by a teacher's hidden rows, against PyTorch's own written out row by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mimo.model.losses import hidden_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_losses(dtype: torch.dtype) -> None:
    """The mean of squared differences, and 1 less the cosine, in fp32; the teacher gets no gradient."""
    torch.manual_seed(1)
    rows, teacher = (torch.randn(5, 7).to(dtype).requires_grad_() for _ in range(2))
    wanted = functional.mse_loss(rows.float(), teacher.float(), reduction="none").mean(1)
    torch.testing.assert_close(hidden_losses(rows, teacher, "mse"), wanted)
    one = torch.stack([1 - a @ b / (a.norm() * b.norm()) for a, b in zip(rows.float(), teacher.float(), strict=True)])
    found = hidden_losses(rows, teacher, "cosine")
    torch.testing.assert_close(found, one)
    gradients = [torch.autograd.grad(each.sum(), rows)[0] for each in (found, one)]
    torch.testing.assert_close(*gradients)
    assert not hidden_losses(rows.detach(), teacher, "mse").requires_grad


def test_rows_of_zeros_and_no_rows() -> None:
    """Have a finite loss and gradient, and none at all."""
    rows, none = torch.zeros(2, 3, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    for how in ("mse", "cosine"):
        hidden_losses(rows, torch.ones(2, 3), how).sum().backward()
        assert rows.grad is not None
        assert rows.grad.isfinite().all()
        assert hidden_losses(none, torch.ones(0, 3), how).shape == (0,)
