"""What a stage of the encoder takes, by formula. Free of torch; `_encoder.py` says what is computed.

W encoder width, H the language model's, T rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mimo.model import OpCost, Stage, encoder_layer_cost, linear_cost, projector_cost
from mimo_encoder_radio._config import RadioConfig
from mimo_encoder_radio._grids import grids_of


def radio_work(
    config: RadioConfig, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over images of these sizes."""
    grids = [grid for size in sizes for grid in grids_of(config, size)]
    patches = [math.prod(grid) for grid in grids]
    layer = encoder_layer_cost(
        [config.prefix + count for count in patches],
        width=config.width,
        heads=config.heads,
        intermediate=config.intermediate,
        recompute=recompute,
        key_bias=True,
    )
    encoder = sum([layer] * len(stage.layers(config.layers)), OpCost())
    if stage.is_first:
        pixels = config.channels * config.patch**2
        learned = (config.positions**2 + config.prefix) * config.width
        encoder += linear_cost(sum(patches), pixels, config.width, of_items=True)
        encoder += OpCost(copied=sum(patches) * pixels, weights=learned)
    if not stage.is_last:
        return {"encoder": encoder}
    class_rows = len(config.keep)
    projector = projector_cost(config.projector, grids, width=config.width, hidden=hidden, class_tokens=class_rows)
    return {"encoder": encoder, "projector": projector}
