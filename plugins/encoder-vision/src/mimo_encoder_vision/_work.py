"""What a stage of the encoder takes, by formula. Free of torch; `_encoder.py` says what is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mimo.model import OpCost, Stage, encoder_layer_cost, linear_cost, projector_cost
from mimo_encoder_vision._config import LearnedConfig, VisionConfig
from mimo_encoder_vision._grids import grids_of


def encoder_work(
    config: VisionConfig, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over images of these sizes."""
    grids = [grid for size in sizes for grid in grids_of(config, size)]
    lengths = [config.class_tokens + down * across for down, across in grids]
    rows, width = sum(lengths), config.width
    layer = encoder_layer_cost(
        lengths,
        width=width,
        heads=config.heads,
        intermediate=config.intermediate,
        recompute=recompute,
        key_bias=config.key_bias,
    )
    layers = stage.layers(config.layers)
    run = len([index for index in layers if index < config.depth])
    encoder = sum([layer] * run, OpCost(weights=layer.weights * (len(layers) - run)))
    if stage.is_first:
        pixels = config.channels * config.patch**2
        first = linear_cost(rows, pixels, width, bias=config.patch_bias, of_items=True)
        first += OpCost(copied=rows * pixels, weights=config.class_tokens * width)
        if isinstance(config, LearnedConfig):
            side = config.places
            resized = {*grids} - {(side, side)}
            products = sum(2.0 * width * down * side * (side + across) for down, across in resized)
            first += OpCost(weighted=products, of_items=products, weights=(config.class_tokens + side**2) * width)
        if config.pre_norm:
            first += OpCost(copied=rows * width, weights=2 * width)
        encoder = first + encoder
    if not stage.is_last:
        return {"encoder": encoder}
    last = OpCost(copied=float(rows * width * config.final_norm), weights=2 * width)
    projector = projector_cost(config.projector, grids, width=width, hidden=hidden, class_tokens=config.class_rows)
    return {"encoder": encoder + last, "projector": projector}
