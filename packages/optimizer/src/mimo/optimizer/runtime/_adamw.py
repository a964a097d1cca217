"""AdamW over DTensors that computes on their local parts: torch's fused kernel, without DTensor dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.optimizer._specs import GRADIENT_SCALE
from mimo.optimizer.runtime._bf16_moments import bf16_adamw
from mimo.optimizer.runtime._fused_adamw import fused_adamw
from mimo.optimizer.runtime._loading import load_in_place
from mimo.topology.meshes import laid_out, local


def zeros_like(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros that lie as a parameter does, and learn nothing; of its ``dtype`` if none is given.

    `torch.zeros_like` has DTensor work out once for each shape how they lie, which takes longer than all else that is
    done to begin with a small module's state.
    """
    return laid_out(torch.zeros_like(local(parameter), dtype=dtype, requires_grad=False), like=parameter)


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


class LocalAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, fused, for plain tensors and DTensors, all on one device.

    State is there from the start and stays where it is: ``exp_avg`` and ``exp_avg_sq`` shaped like the parameter, in
    ``moments``, which is fp32 or bf16; ``step`` a scalar tensor. Gradients are multiplied by
    `mimo.optimizer.GRADIENT_SCALE` of their group.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float = 0.0,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: torch.dtype = torch.float32,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, GRADIENT_SCALE: 1.0}
        super().__init__(params, settings)
        self._moments = moments
        self._step = bf16_adamw if moments == torch.bfloat16 else fused_adamw
        self._pieces = [self._begin(group["params"]) for group in self.param_groups]

    def _begin(self, parameters: Sequence[nn.Parameter]) -> _Pieces:
        """Make the state of the parameters of a group."""
        count = torch.zeros(len(parameters), device=parameters[0].device)
        for parameter, step in zip(parameters, count.unbind(), strict=True):
            self.state[parameter] = {
                "step": step,
                "exp_avg": zeros_like(parameter, self._moments),
                "exp_avg_sq": zeros_like(parameter, self._moments),
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
            self._step(
                live.parameters,
                [local(group["params"][place].grad) for place in places],
                live.averages,
                live.squares,
                live.steps,
                group,
            )
