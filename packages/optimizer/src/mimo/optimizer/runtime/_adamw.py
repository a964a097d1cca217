"""AdamW over DTensors that computes on their local parts: torch's fused kernel, without DTensor dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.optimizer._specs import GRADIENT_SCALE
from mimo.optimizer.runtime._loading import load_in_place
from mimo.topology.meshes import laid_out, local


def zeros_like(parameter: Tensor) -> Tensor:
    """Return zeros that lie as a parameter does, and learn nothing.

    `torch.zeros_like` has DTensor work out once for each shape how they lie, which takes longer than all else that is
    done to begin with a small module's state.
    """
    return laid_out(torch.zeros_like(local(parameter), requires_grad=False), like=parameter)


@attrs.frozen(kw_only=True)
class _Pieces:
    """What the kernel works on, found once: this rank's pieces of the parameters of a group, and of their state.

    ``steps`` are the single numbers of ``count``, if there is one, so that one addition counts them all.
    """

    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    count: Tensor | None

    def only(self, places: Sequence[int]) -> _Pieces:
        """Return those at some places."""
        lists = (self.parameters, self.averages, self.squares, self.steps)
        parameters, averages, squares, steps = ([one[place] for place in places] for one in lists)
        return _Pieces(parameters=parameters, averages=averages, squares=squares, steps=steps, count=None)

    def add_step(self) -> None:
        """Count one step."""
        if self.count is None:
            torch._foreach_add_(self.steps, 1)
        else:
            self.count.add_(1)


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


class LocalAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, fused, for plain tensors and DTensors, all on one device.

    State is there from the start and stays where it is: ``exp_avg`` and ``exp_avg_sq`` like the parameter, ``step`` a
    scalar tensor. Gradients are multiplied by `mimo.optimizer.GRADIENT_SCALE` of their group.
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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, GRADIENT_SCALE: 1.0}
        super().__init__(params, settings)
        self._pieces = [self._begin(group["params"]) for group in self.param_groups]

    def _begin(self, parameters: Sequence[nn.Parameter]) -> _Pieces:
        """Make the state of the parameters of a group."""
        count = torch.zeros(len(parameters), device=parameters[0].device)
        for parameter, step in zip(parameters, count.unbind(), strict=True):
            self.state[parameter] = {
                "step": step,
                "exp_avg": zeros_like(parameter),
                "exp_avg_sq": zeros_like(parameter),
            }
        states = [self.state[parameter] for parameter in parameters]
        return _Pieces(
            parameters=[local(parameter) for parameter in parameters],
            averages=[local(state["exp_avg"]) for state in states],
            squares=[local(state["exp_avg_sq"]) for state in states],
            steps=[state["step"] for state in states],
            count=count,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, into the memory that is there, as `load_in_place` does."""
        load_in_place(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group, pieces in zip(self.param_groups, self._pieces, strict=True):
            places = [place for place, one in enumerate(group["params"]) if one.grad is not None]
            if not places:
                continue
            live = pieces if len(places) == len(pieces.steps) else pieces.only(places)
            live.add_step()
            fused_adamw(
                live.parameters,
                [local(group["params"][place].grad) for place in places],
                live.averages,
                live.squares,
                live.steps,
                group,
            )
