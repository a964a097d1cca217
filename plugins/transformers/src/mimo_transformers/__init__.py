"""Models of `transformers` as they are published, in the grids of mimo. Free of torch until one is built."""

from mimo_transformers._encoder_plugin import HF_ENCODER
from mimo_transformers._images_plugin import HF_IMAGES
from mimo_transformers._plugin import HF_DECODER
from mimo_transformers.family import HfDecoderConfig, HfEncoderConfig, shrink
from mimo_transformers.whole.config import HfImagesConfig

__all__ = [
    "HF_DECODER",
    "HF_ENCODER",
    "HF_IMAGES",
    "HfDecoderConfig",
    "HfEncoderConfig",
    "HfImagesConfig",
    "shrink",
]
