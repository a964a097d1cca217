"""Published weights of the library's models, in and out. Free of torch until a table is asked for."""

from mimo_transformers.weights.families import CAUSAL, IMAGES, TOWERS
from mimo_transformers.weights.tested import RECORD

__all__ = ["CAUSAL", "IMAGES", "RECORD", "TOWERS"]
