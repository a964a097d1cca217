"""Which microbatch and lane each sample of a step goes to, and each of its items: plain numbers, free of torch."""

from mimo.data.placement.filling import fill, microbatch_numbers
from mimo.data.placement.placement import (
    fed_lanes,
    lane_costs,
    lane_rows,
    place_by_cost,
    place_by_count,
    place_filled,
    step_cost,
)
from mimo.data.placement.sizes import EncoderLoads, Loads, PlacedMicrobatch, in_whole_numbers

__all__ = [
    "EncoderLoads",
    "Loads",
    "PlacedMicrobatch",
    "fed_lanes",
    "fill",
    "in_whole_numbers",
    "lane_costs",
    "lane_rows",
    "microbatch_numbers",
    "place_by_cost",
    "place_by_count",
    "place_filled",
    "step_cost",
]
