"""The feed-forward part of a layer as a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

It reads as if all experts were here: `expert_plan.py` says how they are spread, `mimo.model.runtime.Dispatch` moves
the rows. Shapes: T rows, n of them routed here, H hidden, E experts, k chosen by each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from mimo.model.draws import DrawKeys, Drawn
from mimo.model.language.mlp import Mlp, activated
from mimo.model.language.routing import Routing
from mimo.model.layers import Choices, GroupedLinear, Router
from mimo.model.parallel import Dispatch, ExpertAxis
from mimo.model.spec import MoeConfig


class Experts(nn.Module):
    """Up, `activated`, and down again, once for each expert.

    Attributes:
        axis: over which the experts are spread, and the width inside each is cut.
        draw_keys: by which what is added to them draws, others for each expert of a row.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.count = config.experts
        width = config.expert_intermediate or config.intermediate
        self.gate = GroupedLinear(config.experts, config.hidden, width) if config.gated else None
        self.up = GroupedLinear(config.experts, config.hidden, width)
        self.down = GroupedLinear(config.experts, width, config.hidden)
        self.axis = ExpertAxis.single()
        self.draw_keys = DrawKeys()

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        """Return [n, H] of ``x`` [n, H]: for each row the weighted sum of what its experts make of it."""
        dispatch = Dispatch.of(choices.experts, experts=self.count, axis=self.axis)
        rows = dispatch.send(x)
        counts = dispatch.counts
        with self.draw_keys.at(self._sent(dispatch, choices)):
            gate = None if self.gate is None else self.gate(rows, counts)
            finished = self.finish(self.up(rows, counts), gate, counts)
        made = dispatch.bring(finished)  # [n, k, H]
        return (made * choices.weights.unsqueeze(2)).sum(1).to(x.dtype)

    def finish(self, up: Tensor, gate: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Return what the experts make of their rows, of their first products: cheap to compute again."""
        return cast("Tensor", self.down(activated(up, gate), counts))

    def _sent(self, dispatch: Dispatch, choices: Choices) -> Drawn:
        """Return the keys of the rows that this rank's experts take, if something draws by them."""
        keys, linears = self.draw_keys, (part for part in self.children() if isinstance(part, GroupedLinear))
        return keys.sent(dispatch, choices.experts) if any(part.draws for part in linears) else keys.on(None)


class Moe(nn.Module):
    """A router, its experts, and with ``shared_intermediate`` an expert of that width that every row goes through.

    Attributes:
        draw_keys: by which its parts draw.
    """

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
        self.draw_keys = DrawKeys()

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Choices]:
        """Return [T, H] of ``x`` [T, H], and the choices of the rows that are routed here."""
        rows = routing.take(x)
        choices = self.router(rows)
        with self.draw_keys.at(routing.keys(self.draw_keys)):
            made = self.experts(rows, choices)
        y = routing.put(made)
        return y if self.shared is None else y + self.shared(x), choices
