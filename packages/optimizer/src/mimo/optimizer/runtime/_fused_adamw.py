"""Torch's fused AdamW on lists of local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mimo.optimizer._specs import GRADIENT_SCALE


def fused_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Step local fp32 tensors of one device in place by torch's fused AdamW, which scales gradients as it goes.

    Args:
        parameters: any number of them.
        gradients: theirs; changed to what they are after scaling.
        averages: of gradients.
        squares: averages of their squares.
        steps: which one this is of each, from 1, as scalar tensors.
        settings: ``lr``, ``betas``, ``weight_decay``, ``eps`` and `mimo.optimizer.GRADIENT_SCALE`.
    """
    if not parameters:
        return
    scale = settings[GRADIENT_SCALE]
    # The kernel divides. Left out at 1, it reads and writes less.
    divisor = None if scale == 1 else torch.full((), 1 / scale, device=parameters[0].device)
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=settings["lr"],
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )
