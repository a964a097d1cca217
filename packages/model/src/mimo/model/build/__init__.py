"""A module checked and built for a rank. What is named here is free of torch; the other modules need it."""

from mimo.model.build.checks import check_module, check_training, stage_trains
from mimo.model.build.frozen import Frozen, is_frozen, named_by_parts

__all__ = [
    "Frozen",
    "check_module",
    "check_training",
    "is_frozen",
    "named_by_parts",
    "stage_trains",
]
