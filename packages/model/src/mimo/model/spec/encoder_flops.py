"""What a layer that encoders share takes, by formula; `mimo.model.runtime.EncoderLayer` says what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs

from mimo.model.spec.flops import OpCost, attention_cost, linear_cost

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "squared_relu"]
"""What `EncoderLayer` and `EncoderMlp` may have between their products."""


def encoder_layer_cost(
    lengths: Sequence[int], *, width: int, heads: int, intermediate: int, recompute: str, key_bias: bool = False
) -> OpCost:
    """Return what a forward of one `EncoderLayer` takes.

    Args:
        lengths: rows of each item.
        width: of a row.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        recompute: what backward computes again.
        key_bias: whether keys have a bias.
    """
    rows = sum(lengths)
    square = linear_cost(rows, width, width, bias=True)
    key = linear_cost(rows, width, width, bias=key_bias, shared=True)
    value = linear_cost(rows, width, width, bias=True, shared=True)
    layer = square + square + key + value + attention_cost(lengths, width=width, causal=False)
    layer += linear_cost(rows, width, intermediate, bias=True) + linear_cost(rows, intermediate, width, bias=True)
    # Saved: the rows and their norm, twice; queries, keys, values, what they attend to and its log-sum, in the order of
    # the kernel's calls; what they attend to in the order of rows too; the two ends of the activation.
    layer += OpCost(
        copied=4.0 * rows * width,
        split=rows * (5.0 * width + heads + 2.0 * intermediate),
        working=float(rows * intermediate),
        weights=4 * width,
    )
    if recompute == "none":
        return layer
    if recompute == "selective":  # what lies between the products: attention itself, and the activation
        again = rows * (2.0 * width + heads + intermediate)
        return attrs.evolve(layer, repeated=layer.inner, split=layer.split - again, recomputed=again)
    inputs = float(rows * width)
    return attrs.evolve(
        layer, repeated=layer.forward, split=0, copied=inputs, recomputed=layer.split + layer.copied - inputs
    )
