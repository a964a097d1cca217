"""What a student learns from a teacher's hidden rows: how far its own are from them, or how their directions differ.

Both are what the head reads, behind the final norm. Shapes: T rows, H hidden.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from mimo.model.losses.rows import wide

HiddenLoss: TypeAlias = Literal["mse", "cosine"]
"""How rows are compared: the mean over H of squared differences (FitNets, arXiv:1412.6550, section 2.2, of equal
widths), or 1 less the cosine of the angle between them (DistilBERT, arXiv:1910.01108, section 3)."""

_SHORTEST = 1e-8
"""Rows whose lengths multiply to less have no direction."""


def hidden_losses(rows: Tensor, teacher: Tensor, how: HiddenLoss) -> Tensor:
    """Return the loss [T] of each row in fp32 at least; the gradient is that of ``rows`` alone.

    Args:
        rows: [T, H] of the student.
        teacher: [T, H] of the teacher.
        how: they are compared.
    """
    own, wanted = wide(rows), wide(teacher.detach())
    if how == "mse":
        return (own - wanted).square().mean(1)
    lengths: Tensor = own.norm(dim=1) * wanted.norm(dim=1)
    return 1 - (own * wanted).sum(1) / lengths.clamp_min(_SHORTEST)
