"""What a forward of one stage takes, by formula: arithmetic, and what it keeps for its backward.

Costs follow from this before anything has been measured. T rows of all samples of a lane, over all its context and
tensor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class OpCost:
    """What one forward of a stage takes, all ranks of a lane together.

    A product of T rows with a weight of I x O elements is 2·T·I·O operations; its backward is two such products, one
    for the rows' gradient and one for the weight's; of rows that an item holds, as pixels, only the latter. A product
    of two activations, as attention has, takes two as well, both for the rows' gradients.

    Args:
        weighted: operations in products with weights.
        of_items: of these, those in products of rows that an item holds, which need no gradient.
        inner: operations in products of activations.
        repeated: of both, those that backward does once more because it recomputes.
        split: elements that it saves for its backward, of tensors that tensor ranks split.
        logits: elements of logits, which tensor ranks split; the loss keeps them in fp32, or a few rows' at a time.
        copied: elements that it saves besides, of tensors that they split with sequence parallelism only.
        paired: the square root of elements that it saves of all pairs of rows of a microbatch, as a mask over several
            items has them: with several items it grows as they do. Each tensor rank has all of them.
        recomputed: elements that recomputing brings back, at most at one time.
        working: elements of gradients of rows that its backward holds besides, at most at one time, of tensors that
            tensor ranks split.
        operands: elements that the gradients of weights are made of, rows and their gradients.
        weights: elements of the stage's parameters.
        expert_weights: of these, those of experts, which lie on the expert view of the grid.
        largest: elements of the largest weight of a product, whose gradient is made before it is added to earlier ones.
    """

    weighted: float = 0
    of_items: float = 0
    inner: float = 0
    repeated: float = 0
    split: float = 0
    logits: float = 0
    copied: float = 0
    paired: float = 0
    recomputed: float = 0
    working: float = 0
    operands: float = 0
    weights: int = 0
    expert_weights: int = 0
    largest: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        """Return what both take, one after the other; what the backward of one takes is gone before the other's."""
        return OpCost(  # field by field, as every step adds up the work of every layer
            weighted=self.weighted + other.weighted,
            of_items=self.of_items + other.of_items,
            inner=self.inner + other.inner,
            repeated=self.repeated + other.repeated,
            split=self.split + other.split,
            logits=self.logits + other.logits,
            copied=self.copied + other.copied,
            paired=math.hypot(self.paired, other.paired),
            recomputed=max(self.recomputed, other.recomputed),
            working=max(self.working, other.working),
            operands=self.operands + other.operands,
            weights=self.weights + other.weights,
            expert_weights=self.expert_weights + other.expert_weights,
            largest=max(self.largest, other.largest),
        )

    @property
    def forward(self) -> float:
        """Operations of the forward."""
        return self.weighted + self.inner

    @property
    def input_gradient(self) -> float:
        """Operations of the part of the backward that others wait for, without what is recomputed."""
        return self.weighted - self.of_items + 2 * self.inner

    @property
    def weight_gradient(self) -> float:
        """Operations of the rest."""
        return self.weighted


def linear_cost(
    rows: float, inputs: int, outputs: int, *, bias: bool = False, shared: bool = False, of_items: bool = False
) -> OpCost:
    """Return what a product of rows with a weight takes that keeps nothing by itself.

    Args:
        rows: how many.
        inputs: columns of the rows.
        outputs: columns of the product.
        bias: whether one is added.
        shared: whether the rows are those of another product, which are saved once for both.
        of_items: whether an item holds the rows.
    """
    operations = 2.0 * rows * inputs * outputs
    return OpCost(
        weighted=operations,
        of_items=operations if of_items else 0,
        operands=rows * (outputs if shared else inputs + outputs),
        weights=inputs * outputs + (outputs if bias else 0),
        largest=inputs * outputs,
    )


def attention_cost(lengths: Sequence[int], *, width: int, causal: bool, window: int = 0) -> OpCost:
    """Return what attention over samples of these lengths takes between queries and output, all heads ``width`` wide.

    Args:
        lengths: rows of each sample.
        width: of all query heads together.
        causal: whether rows attend to earlier ones only, which is half as much.
        window: of these, to how many at most; 0 for all.
    """
    pairs = sum(length * length for length in lengths) / (2 if causal else 1)
    if window:
        pairs -= sum(max(0, length - window) ** 2 for length in lengths) / 2
    return OpCost(inner=4.0 * pairs * width)
