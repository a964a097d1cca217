"""What the generator takes, by formula. Free of torch; `_model.py` says what is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.model import OpCost, encoder_layer_cost, linear_cost
from mimo_generator_flow._config import FlowConfig


def flow_work(
    config: FlowConfig, hidden: int, recompute: str, sizes: Sequence[tuple[int, ...]], rows: Sequence[int]
) -> Mapping[str, OpCost]:
    """Return by part what a forward takes over pictures of these sizes, each made from so many rows."""
    count, read, width = len(sizes), sum(rows), config.hidden
    patches = count * config.targets
    lengths = [max(own, 1) + config.targets for own in rows]
    connector = linear_cost(read, hidden, width, bias=True)
    connector += OpCost(copied=2.0 * read * hidden, weights=2 * hidden + width)
    first = linear_cost(patches, config.patch_width, width, bias=True, of_items=True)
    first += OpCost(copied=patches * config.patch_width)
    time = linear_cost(count, width, width, bias=True, of_items=True) + linear_cost(count, width, width, bias=True)
    time += OpCost(copied=2.0 * count * width, split=2.0 * count * width)
    last = linear_cost(count, width, 2 * width, bias=True) + linear_cost(patches, width, config.patch_width, bias=True)
    # Kept: rows and their norm, what is modulated, and what the loss squares, in fp32.
    last += OpCost(copied=patches * (3.0 * width + 2.0 * config.patch_width))
    layer = _layer_work(config, count, lengths, recompute)
    return {"connector": connector, "generator": sum([layer] * config.layers, first + time) + last}


def _layer_work(config: FlowConfig, count: int, lengths: Sequence[int], recompute: str) -> OpCost:
    width = config.hidden
    layer = encoder_layer_cost(
        lengths, width=width, heads=config.heads, intermediate=config.intermediate, recompute=recompute
    )
    # Norms without weights; of both parts there are besides the norm that is modulated, by how much it is scaled, and
    # what passes the gate; and all that modulates the rows, in one tensor, since the gates are kept.
    kept = 12.0 * sum(lengths) * width
    layer += OpCost(weights=-4 * width)
    if recompute == "full":
        layer = attrs.evolve(layer, recomputed=layer.recomputed + kept)
    else:
        layer += OpCost(copied=kept)
    return layer + linear_cost(count, width, 6 * width, bias=True) + OpCost(copied=6.0 * count * width)
