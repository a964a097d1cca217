"""A vision transformer that keeps each image's own size, written against mimo's public encoder interface only."""

from mimo_encoder_vision._plugin import VIT, VitConfig

__all__ = ["VIT", "VitConfig"]
