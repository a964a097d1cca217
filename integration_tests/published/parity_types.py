"""What stands in the way of whole image-text models of which no folder is made here: the first thing that does.

Of each type the library's own config is looked at: whether it has a part for images and one for text, who reads its
language model, how the model is put together, and whether a kind of image processing is that of its image processor.
"""

from __future__ import annotations

from typing import Any

from parity import one_line
from transformers.models.auto import image_processing_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mimo.hooks import UserError
from mimo.model import read_hf_tested
from mimo_transformers.family import config_of, image_half, is_causal, is_image_text, quiet
from mimo_transformers.image_files import processing_of
from mimo_transformers.image_files.defaults import OTHERS, PLAIN
from mimo_transformers.weights import RECORD

_PIL, _TORCHVISION = "pil", "torchvision"
_OURS = frozenset({"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"})
"""Language models that `decoder` reads and no record of `hf-decoder` has."""


def image_text_types() -> list[str]:
    """Return every model type of which the library has a class for text after images."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def obstacle(model_type: str) -> str:
    """Return what stands first in the way of a type, in plain words that begin with where it lies."""
    if not is_image_text(model_type):
        return "config: not one text_config and one vision_config"
    try:
        with quiet():
            config = config_of(model_type, {})
    except UserError as error:
        return f"config: the library's own can't be made, {_short(error)}"
    return _of_language(config) or _of_parts(config) or _of_images(config)


def _of_language(config: Any) -> str:
    text = config.text_config.model_type
    if text in _OURS:
        return ""
    if not is_causal(text):
        return f"language model: the library has no class of {text} alone that predicts the next token"
    record = read_hf_tested(RECORD, "hf-decoder").get(text)
    return f"language model: {record.problem}" if record is not None and record.problem else ""


def _of_parts(config: Any) -> str:
    try:
        image_half(config)
    except UserError as error:
        return f"parts: {_short(error)}"
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does
        return f"parts: {one_line(f'{type(error).__name__}: {error}')}"
    return ""


def _of_images(config: Any) -> str:
    known: Any = image_processing_auto
    names = known.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type) or {}
    if _PIL not in names:
        which = f"{names[_TORCHVISION]} alone, which needs torchvision" if names else "none in the library"
        return f"images: no image processor by Pillow, with which pixels could be compared, but {which}"
    name = names[_PIL].removesuffix("Pil")
    try:
        processing_of(config.to_dict(), {"image_processor_type": name}, {})
    except UserError:
        if name in {**PLAIN, **OTHERS}:
            return f"not tried: its image processor, {name}, is read here of other types alone"
        return f"images: no kind here is that of {name}"
    return "not tried: no small folder of it is made here"


def _short(error: UserError) -> str:
    return one_line(getattr(error, "got", str(error)))
