"""What a stage of the encoder takes, by formula. Free of torch; `_encoder.py` says what is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mimo.model import OpCost, Stage, encoder_layer_cost, linear_cost, projector_cost
from mimo_encoder_audio._config import WhisperConfig, encoded_rows, stacked_rows


def encoder_work(
    config: WhisperConfig, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over clips of these sizes."""
    lengths = [encoded_rows(config, size) for size in sizes]
    rows, width = sum(lengths), config.width
    layer = encoder_layer_cost(
        lengths, width=width, heads=config.heads, intermediate=config.intermediate, recompute=recompute
    )
    encoder = sum([layer] * len(stage.layers(config.layers)), OpCost())
    if stage.is_first:
        first = linear_cost(2 * rows, 3 * config.mels, width, bias=True, of_items=True)
        second = linear_cost(rows, 3 * width, width, bias=True)
        # Saved: what both products read, and what both activations do.
        saved = OpCost(copied=rows * (6.0 * config.mels + 6.0 * width), weights=config.positions * width)
        encoder = first + second + saved + encoder
    if not stage.is_last:
        return {"encoder": encoder}
    grids = [(stacked_rows(config, size), 1) for size in sizes]
    projector = projector_cost(config.projector, grids, width=width * config.stack, hidden=hidden)
    return {"encoder": encoder + OpCost(copied=rows * width, weights=2 * width), "projector": projector}
