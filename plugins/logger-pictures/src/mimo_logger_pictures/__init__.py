"""Pictures of a run: its loss curve, and what the model wrote for held-out images."""

from mimo_logger_pictures._draw import caption_grid, loss_curve
from mimo_logger_pictures._plugin import CAPTIONS_PICTURE, LOSS_PICTURE, Pictures

__all__ = ["CAPTIONS_PICTURE", "LOSS_PICTURE", "Pictures", "caption_grid", "loss_curve"]
