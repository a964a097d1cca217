"""What the two halves of the optimizer will hold, from shapes. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from mimo.optimizer.estimates import LaidBytes, PartShapes, StateBytes, SteppedShapes
from mimo_optimizer_distributed import estimates
from mimo_optimizer_hybrid._division import Division
from mimo_optimizer_hybrid._memory import HeldBytes

if TYPE_CHECKING:
    from mimo_optimizer_hybrid._config import CpuOffloadConfig


def laid(part: PartShapes, config: CpuOffloadConfig) -> LaidBytes:
    """Tell how parameters lie; they are stepped in the order in which a forward waits for them."""
    found = estimates.laid(part, config)
    order = sorted(found.pieces, key=lambda one: -1 if one.layer is None else one.layer)
    return attrs.evolve(found, pieces=tuple(order))


def state(stepped: SteppedShapes, config: CpuOffloadConfig) -> StateBytes:
    """Tell what host and device hold; with a fraction that the run finds by trial, the most that each can."""
    pieces = sorted(stepped.pieces, key=lambda piece: not piece.tied)  # as the plugin's `_agreement` has them

    def halves(fraction: float) -> HeldBytes:
        return Division.of(
            [piece.numbers for piece in pieces],
            fraction=fraction,
            bucket_bytes=config.bucket_bytes,
            staging_bytes=config.staging_bytes,
            shares=[piece.mean_numbers for piece in pieces],
            kept=sum(piece.tied for piece in pieces),
            pins=stepped.on_accelerator,
        ).bytes

    if config.fraction == "auto":
        return StateBytes(device=halves(0).device, host=halves(1).host, at_most=True)
    held = halves(config.fraction)
    return StateBytes(device=held.device, host=held.host)
