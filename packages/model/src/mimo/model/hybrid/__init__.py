"""The language model `hybrid`. What is named here is free of torch; `model`, `mamba` and `sequences` need it."""

from mimo.model.hybrid.config import HybridConfig
from mimo.model.hybrid.plugin import HYBRID

__all__ = [
    "HYBRID",
    "HybridConfig",
]
