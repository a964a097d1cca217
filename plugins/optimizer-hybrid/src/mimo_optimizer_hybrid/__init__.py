"""AdamW with a chosen part of its state in host memory. The optimizer itself: `mimo_optimizer_hybrid.optimizer`."""

from mimo_optimizer_hybrid._plugin import HYBRID, HybridConfig

__all__ = ["HYBRID", "HybridConfig"]
