"""The feed-forward part of a layer as a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

It reads as if all experts were here: `expert_plan.py` says how they are spread, `mimo.model.runtime.Dispatch` moves
the rows. Shapes: T rows, n of them routed here, H hidden, E experts, k chosen by each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from mimo.model.language.mlp import Mlp, activated
from mimo.model.language.routing import Routing
from mimo.model.layers import Choices, GroupedLinear, Router
from mimo.model.parallel import Dispatch, ExpertAxis
from mimo.model.spec import MoeConfig


class Experts(nn.Module):
    """Up, `activated`, and down again, once for each expert.

    Attributes:
        axis: over which the experts are spread, and the width inside each is cut.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.count = config.experts
        width = config.expert_intermediate or config.intermediate
        self.gate = GroupedLinear(config.experts, config.hidden, width) if config.gated else None
        self.up = GroupedLinear(config.experts, config.hidden, width)
        self.down = GroupedLinear(config.experts, width, config.hidden)
        self.axis = ExpertAxis.single()

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        """Return [n, H] of ``x`` [n, H]: for each row the weighted sum of what its experts make of it."""
        dispatch = Dispatch.of(choices.experts, experts=self.count, axis=self.axis)
        rows = dispatch.send(x)
        counts = dispatch.counts
        gate = None if self.gate is None else self.gate(rows, counts)
        made = dispatch.bring(self.finish(self.up(rows, counts), gate, counts))  # [n, k, H]
        return (made * choices.weights.unsqueeze(2)).sum(1).to(x.dtype)

    def finish(self, up: Tensor, gate: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Return what the experts make of their rows, of their first products: cheap to compute again."""
        return cast("Tensor", self.down(activated(up, gate), counts))


class Moe(nn.Module):
    """A router, its experts, and with ``shared_intermediate`` an expert of that width that every row goes through."""

    stays_eager = "which rows go where is known once the router has chosen"

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.router = Router(
            config.hidden,
            config.experts,
            config.experts_per_token,
            score=config.router_score,
            normalize=config.router_normalize,
            scale=config.router_scale,
            biased=config.router_bias or config.expert_bias_rate > 0,
        )
        self.experts = Experts(config)
        self.shared = Mlp(config, config.shared_intermediate) if config.shared_intermediate else None
        self.bias_rate = config.expert_bias_rate

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Choices]:
        """Return [T, H] of ``x`` [T, H], and the choices of the rows that are routed here."""
        rows = routing.take(x)
        choices = self.router(rows)
        y = routing.put(self.experts(rows, choices))
        return y if self.shared is None else y + self.shared(x), choices
