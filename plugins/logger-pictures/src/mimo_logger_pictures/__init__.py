"""Pictures: a run's loss curve, what the model wrote for held-out images, and what is in a dataset."""

from mimo_logger_pictures._draw import caption_grid, distribution_bars, loss_curve
from mimo_logger_pictures._plugin import CAPTIONS_PICTURE, LOSS_PICTURE, Pictures

__all__ = ["CAPTIONS_PICTURE", "LOSS_PICTURE", "Pictures", "caption_grid", "distribution_bars", "loss_curve"]
