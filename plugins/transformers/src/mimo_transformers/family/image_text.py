"""The library's whole image-text models: which there are, and the half of one that makes rows of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from mimo.hooks import ConfigError
from mimo_transformers.family.library import quiet, types_of

if TYPE_CHECKING:
    from torch import nn

SECTIONS = {"text_config", "vision_config"}


def is_image_text(model_type: str) -> bool:
    """Tell whether the library has a model of a type that reads images and text, each by a part of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if model_type not in CONFIG_MAPPING:
        return False
    made: Any = CONFIG_MAPPING[model_type]
    return made in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and made.sub_configs.keys() >= SECTIONS


def image_text_types() -> tuple[str, ...]:
    """Return the types of all such models."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    every = types_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return tuple(sorted(filter(is_image_text, every)))


def image_text_class(config: Any) -> Any:
    """Return the library's class of a whole model of a config.

    Raises:
        ConfigError: it has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    try:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    except KeyError:
        raise _refusal(config.model_type, "no class for text after images") from None


def new_image_text(config: Any) -> Any:
    """Return the library's whole model of a config, on the device of the caller's context."""
    made = image_text_class(config)
    return made._from_config(config, attn_implementation="sdpa" if made._supports_sdpa else "eager")  # noqa: SLF001 - as `AutoModel` does


@attrs.frozen(kw_only=True, eq=False)
class ImageHalf:
    """What of a whole model of the library makes rows of images.

    Args:
        network: the whole, which has no language model any more.
        base: of it, what has ``get_image_features``.
        tower: of that, the vision tower.
        tower_name: its attribute.
        path: of the base in the whole, empty where it is that.
    """

    network: Any
    base: Any
    tower: nn.Module
    tower_name: str
    path: str


def image_half(config: Any) -> ImageHalf:
    """Return the half of a whole model that makes rows of images, without storage.

    Raises:
        ConfigError: the model isn't made of a vision tower, a language model, and what leads from one to the other.
    """
    import torch

    with quiet(), torch.device("meta"):
        network = new_image_text(config)
    return half_of(network)


def half_of(network: Any) -> ImageHalf:
    """Return the half of a whole model of the library that makes rows of images; takes its language model out."""
    config = network.config
    base = network.base_model
    if not hasattr(base, "get_image_features"):
        raise _refusal(config.model_type, "no get_image_features")
    children = dict(base.named_children())
    towers = [name for name, part in children.items() if getattr(part, "config", None) is config.vision_config]
    texts = [name for name, part in children.items() if getattr(part, "config", None) is config.text_config]
    if len(towers) != 1 or len(texts) != 1:
        raise _refusal(config.model_type, f"{len(towers)} vision towers and {len(texts)} language models")
    for name in texts:
        delattr(base, name)
    path = next(path for path, part in network.named_modules() if part is base)
    return ImageHalf(network=network, base=base, tower=children[towers[0]], tower_name=towers[0], path=path)


def _refusal(model_type: str, got: str) -> ConfigError:
    return ConfigError(
        "config.model_type",
        expected="an image-text model of transformers with one vision tower and one language model",
        got=f"{model_type!r} with {got}",
        fix="plugins/transformers/README.md lists those that can be trained.",
    )
