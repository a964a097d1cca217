"""What a stage of the encoder takes, by formula. Free of torch; `_encoder.py` says what is computed.

W encoder width, H the language model's, T patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from mimo.model import Stage, Work, attention, product
from mimo_encoder_vision._plugin import VitConfig, grid_of


def encoder_work(
    config: VitConfig, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, Work]:
    """Return by part what a forward of ``stage`` takes over images of these sizes."""
    lengths = [math.prod(grid_of(config, size)) for size in sizes]
    rows, width = sum(lengths), config.width
    encoder = sum([_layer(config, recompute, lengths)] * len(stage.layers(config.layers)), Work())
    if stage.is_first:
        pixels = config.channels * config.patch**2
        encoder = product(rows, pixels, width, bias=True) + Work(copied=rows * pixels) + encoder
    if not stage.is_last:
        return {"encoder": encoder}
    middle = config.projector or hidden
    projector = product(rows, width, middle, bias=True) + product(rows, middle, hidden, bias=True)
    projector += Work(copied=rows * width, split=2.0 * rows * middle)
    return {"encoder": encoder + Work(copied=rows * width), "projector": projector}


def _layer(config: VitConfig, recompute: str, lengths: Sequence[int]) -> Work:
    rows, width = sum(lengths), config.width
    square = product(rows, width, width, bias=True)
    shared = product(rows, width, width, bias=True, shared=True)
    layer = square + square + shared + shared + attention(lengths, width=width, causal=False)
    layer += product(rows, width, config.intermediate, bias=True) + product(rows, config.intermediate, width, bias=True)
    # Kept: the rows and their norm, twice; queries, keys, values, what they attend to and its log-sum; GELU's two ends.
    layer += Work(copied=4.0 * rows * width, split=rows * (4.0 * width + config.heads + 2.0 * config.intermediate))
    if recompute == "none":
        return layer
    if recompute == "selective":  # what lies between the products: attention itself, and GELU
        again = rows * (float(width) + config.heads + config.intermediate)
        return attrs.evolve(layer, repeated=layer.inner, split=layer.split - again, recomputed=again)
    kept = float(rows * width)
    return attrs.evolve(
        layer, repeated=layer.forward, split=0, copied=kept, recomputed=layer.split + layer.copied - kept
    )
