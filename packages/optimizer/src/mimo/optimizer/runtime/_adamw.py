"""AdamW over DTensors that computes on their local parts: torch's fused kernel, without DTensor dispatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class LocalAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, fused, for plain tensors and DTensors alike.

    State is there from the start: ``exp_avg`` and ``exp_avg_sq`` like the parameter, ``step`` a scalar tensor.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float = 0.0,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            live = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in live]
            adamw(
                [_local(parameter) for parameter in live],
                [_local(parameter.grad) for parameter in live],
                [_local(state["exp_avg"]) for state in states],
                [_local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
