"""The feed-forward part of a decoder layer as a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

It reads as if all experts were here: `_expert_plan.py` says how they are spread, `mimo.model.runtime.Dispatch` moves
the rows. Shapes: T rows, n of them routed here, H hidden, E experts, k chosen by each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from mimo.model._decoder_spec import DecoderConfig
from mimo.model._mlp import Mlp
from mimo.model._routing import Routing
from mimo.model.runtime import Choices, Dispatch, ExpertAxis, GroupedLinear, Router


class Experts(nn.Module):
    """SwiGLU, once for each expert.

    Attributes:
        axis: over which the experts are spread, and the width inside each is cut.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.count = config.experts
        width = config.expert_intermediate or config.intermediate
        self.gate = GroupedLinear(config.experts, config.hidden, width)
        self.up = GroupedLinear(config.experts, config.hidden, width)
        self.down = GroupedLinear(config.experts, width, config.hidden)
        self.axis = ExpertAxis.single()

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        """Return [n, H] of ``x`` [n, H]: for each row the weighted sum of what its experts make of it."""
        dispatch = Dispatch.of(choices.experts, experts=self.count, axis=self.axis)
        rows = dispatch.send(x)
        counts = dispatch.counts
        made = dispatch.bring(self.finish(self.gate(rows, counts), self.up(rows, counts), counts))  # [n, k, H]
        return (made * choices.weights.unsqueeze(2)).sum(1).to(x.dtype)

    def finish(self, gate: Tensor, up: Tensor, counts: Sequence[int]) -> Tensor:
        """Return what the experts make of their rows, of two of their products: cheap to compute again."""
        return cast("Tensor", self.down(functional.silu(gate) * up, counts))


class Moe(nn.Module):
    """A router, its experts, and with ``shared_intermediate`` an expert of that width that every row goes through."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.router = Router(
            config.hidden,
            config.experts,
            config.experts_per_token,
            score=config.router_score,
            normalize=config.router_normalize,
            scale=config.router_scale,
            biased=config.expert_bias_rate > 0,
        )
        self.experts = Experts(config)
        self.shared = (
            Mlp(config.hidden, config.shared_intermediate, bias=config.mlp_bias) if config.shared_intermediate else None
        )

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Choices]:
        """Return [T, H] of ``x`` [T, H], and the choices of the rows that are routed here."""
        rows = routing.take(x)
        choices = self.router(rows)
        y = routing.put(self.experts(rows, choices))
        return y if self.shared is None else y + self.shared(x), choices
