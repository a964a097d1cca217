"""Random draws inside a step, keyed by seed, step, sample, place in the model and feature: no layout changes them."""

from mimo.model.draws.attach import attach_draws
from mimo.model.draws.dropout import DrawsAtRandom, Dropout, DropPath, Site
from mimo.model.draws.numbers import fold, keep, key_of, key_of_name, normal, threshold_of, uniform
from mimo.model.draws.rows import DrawKeys, Drawn, ReadsDrawKeys, item_keys, sample_rows, step_key

__all__ = [
    "DrawKeys",
    "Drawn",
    "DrawsAtRandom",
    "DropPath",
    "Dropout",
    "ReadsDrawKeys",
    "Site",
    "attach_draws",
    "fold",
    "item_keys",
    "keep",
    "key_of",
    "key_of_name",
    "normal",
    "sample_rows",
    "step_key",
    "threshold_of",
    "uniform",
]
