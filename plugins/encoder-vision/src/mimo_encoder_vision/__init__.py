"""Vision transformers that keep each image's own size or tile it, against mimo's public encoder interface only."""

from mimo_encoder_vision._config import ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._plugin import CLIP, SIGLIP, VIT

__all__ = ["CLIP", "SIGLIP", "VIT", "ClipConfig", "SiglipConfig", "VisionConfig", "VitConfig"]
