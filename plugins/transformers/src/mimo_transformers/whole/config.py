"""Settings of ``hf-images``: a whole image-text model, of which the half that makes rows of images is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.hooks import ConfigError, check_at_most
from mimo.model import MAX_LAYERS, MAX_PIXELS, MAX_WIDTH
from mimo_transformers.family import HfConfig, is_image_text
from mimo_transformers.images import ImageProcessing
from mimo_transformers.whole.processing import processing_from

_LIMITS = {"hidden_size": MAX_WIDTH, "num_hidden_layers": MAX_LAYERS, "depth": MAX_LAYERS, "image_size": MAX_PIXELS}


@attrs.frozen(kw_only=True)
class HfImagesConfig(HfConfig):
    """An image-text model of `transformers`: its vision tower, and what leads from there to its language model.

    Args:
        images: how images are prepared and how many rows each becomes: ``kind``, and the settings of that kind.
    """

    images: Mapping[str, Any] = attrs.field(factory=dict)

    def _make(self) -> Any:
        library = self._library("config")
        if not is_image_text(self.model_type):
            raise ConfigError("config.model_type", expected="a model of images and text", got=repr(self.model_type))
        for section in ("text_config", "vision_config"):
            inside = getattr(library, section)
            known = {key: most for key, most in _LIMITS.items() if isinstance(getattr(inside, key, None), int)}
            check_at_most(inside, known, where=f"config.values.{section}")
        return library

    @property
    def hidden(self) -> int:
        """Width of the language model's rows."""
        return int(self.library().text_config.hidden_size)

    @property
    def processing(self) -> ImageProcessing:
        """How images are prepared."""
        return processing_from(self.images)

    @property
    def heads(self) -> Mapping[str, int]:
        """Counts of heads of the tower, by the keys that set them."""
        tower = self.library().vision_config
        known = {key: getattr(tower, key, None) for key in ("num_attention_heads", "num_heads")}
        return {f"values.vision_config.{key}": one for key, one in known.items() if isinstance(one, int) and one}
