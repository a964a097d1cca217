"""Which experts each row goes to, and how much each counts.

Shapes: n rows, H hidden, E experts, k of them for each row.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.layers.weights import initial_std
from mimo.model.parallel import decided
from mimo.topology.device_copies import to_device

Score: TypeAlias = Literal["softmax", "sigmoid"]
"""How logits become scores: shares of one, or each by itself."""


@attrs.frozen(kw_only=True, eq=False)
class Choices:
    """What a router decided.

    Args:
        logits: [n, E] in fp32.
        scores: [n, E] of the logits.
        experts: [n, k] chosen.
        weights: [n, k] of what the chosen experts return.
    """

    logits: Tensor
    scores: Tensor
    experts: Tensor
    weights: Tensor

    @property
    def shares(self) -> Tensor:
        """Scores [n, E] that add up to one in each row."""
        return self.scores / self.scores.sum(1, keepdim=True).clamp_min(torch.finfo(self.scores.dtype).tiny)


class Router(nn.Module):
    """The k best scores of a linear layer, computed in fp32 at least.

    Args:
        width: H.
        experts: E.
        chosen: k.
        score: how logits become scores.
        normalize: divide the chosen scores by their sum.
        scale: multiplies the weights.
        biased: add to the scores a bias, for choosing only, which no gradient trains but `follow` moves
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    def __init__(
        self, width: int, experts: int, chosen: int, *, score: Score, normalize: bool, scale: float, biased: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False) if biased else None
        self.chosen = chosen
        self.score = score
        self.normalize = normalize
        self.scale = scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, clear the bias."""
        nn.init.normal_(self.weight, std=initial_std(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Choices:
        """Return the choices of ``x`` [n, H]; where a forward is computed again, of the experts chosen in the first."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = functional.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(1) if self.score == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if self.bias is not None:
            ranked = ranked + self.bias.to(wide)
        experts = decided(lambda: ranked.topk(self.chosen, dim=1).indices)
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        return Choices(logits=logits, scores=scores, experts=experts, weights=weights * self.scale)

    @torch.no_grad()
    def follow(self, load: Tensor, rate: float) -> None:
        """Move the bias of each expert by ``rate``: up where its load is below the mean, down where it is above.

        Args:
            load: [E] rows that chose each expert in the step, on all ranks together.
            rate: of the move.
        """
        assert self.bias is not None
        load = load.double()
        self.bias.add_(to_device((load.mean() - load).sign(), self.bias.device, self.bias.dtype), alpha=rate)
