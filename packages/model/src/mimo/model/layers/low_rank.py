"""Two thin products beside a linear, whose product is added to its own: low-rank adaptation.

Shapes: R rows, I inputs, O outputs, r the rank; weights of experts have E before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mimo.model.draws import Site
from mimo.model.layers.deferred_weights import WeightGradQueue
from mimo.model.layers.products import Form, multiply
from mimo.model.layers.weights import initial_std


class LowRank(nn.Module):
    """``scale · (x @ down.T) @ up.T`` (Hu et al. 2021, arXiv:2106.09685, section 4.1); nothing at first.

    Args:
        rank: r.
        inputs: I.
        outputs: O.
        experts: how many there are, where each has its own, in a list; else it is empty.
        scale: of what is added.
        dropout: the rate at which features of the rows are dropped for it, and for nothing else.

    Attributes:
        rate: the same.
        site: where it draws; `build_part` sets it.
        weight_grad_queue: where weight gradients are deferred; `build_part` sets it.
    """

    def __init__(
        self, rank: int, inputs: int, outputs: int, *, experts: Sequence[int] = (), scale: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(*experts, rank, inputs))
        self.up = nn.Parameter(torch.empty(*experts, outputs, rank))
        self.scale = scale
        self.rate = dropout
        self.site: Site | None = None
        self.weight_grad_queue: WeightGradQueue | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``down`` as weights that read its inputs are drawn, and clear ``up``."""
        nn.init.normal_(self.down, std=initial_std(self.down.shape[-1]))
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor, *, form: Form | None = None, outputs: slice | None = None) -> Tensor:
        """Return what is added to the product of ``x`` [R, I], [R, O].

        Args:
            x: rows.
            form: of the product.
            outputs: which outputs of the piece are computed, None for all.
        """
        x = x if self.site is None else self.site.drop(x)
        middle = multiply(x, self.down, form=form, weight_grad_queue=self.weight_grad_queue) * self.scale
        return multiply(middle, self.up, form=form, outputs=outputs, weight_grad_queue=self.weight_grad_queue)

    def product(self) -> Tensor:
        """Return what is added to the weight itself, the piece of it that lies here."""
        return self.up @ self.down * self.scale
