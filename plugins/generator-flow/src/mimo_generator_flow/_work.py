"""What the generator takes, by formula. Free of torch; `_model.py` says what is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.model import OpCost, Stage, encoder_layer_cost, linear_cost
from mimo_generator_flow._config import FlowConfig


def flow_work(
    config: FlowConfig,
    hidden: int,
    stage: Stage,
    recompute: str,
    sizes: Sequence[tuple[int, ...]],
    rows: Sequence[int],
) -> Mapping[str, OpCost]:
    """Return by part what a forward of a stage takes over pictures of these sizes, each made from so many rows."""
    count, read, width = len(sizes), sum(rows), config.hidden
    patches = count * config.targets
    lengths = [max(own, 1) + config.targets for own in rows]
    layer = _layer_work(config, count, lengths, recompute)
    generator = sum([layer] * len(stage.layers(config.layers)), OpCost())
    if stage.is_last:
        generator += linear_cost(count, width, 2 * width, bias=True)
        generator += linear_cost(patches, width, config.patch_width, bias=True)
        # Kept: rows and their norm, by how much it is scaled, and what the loss squares, in fp32.
        generator += OpCost(copied=patches * (4.0 * width + 2.0 * config.patch_width))
    if not stage.is_first:
        return {"generator": generator}
    connector = linear_cost(read, hidden, width, bias=True)
    connector += OpCost(copied=2.0 * read * hidden, weights=2 * hidden + width)
    generator += linear_cost(patches, config.patch_width, width, bias=True, of_items=True)
    generator += linear_cost(count, width, width, bias=True, of_items=True) + linear_cost(
        count, width, width, bias=True
    )
    generator += OpCost(copied=patches * config.patch_width + 4.0 * count * width)
    return {"connector": connector, "generator": generator}


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
