"""AdamW with a chosen part of its state in host memory. The optimizer itself: `mimo_optimizer_hybrid.optimizer`."""

from mimo_optimizer_hybrid._config import CpuOffloadConfig
from mimo_optimizer_hybrid._plugin import HYBRID

__all__ = ["HYBRID", "CpuOffloadConfig"]
