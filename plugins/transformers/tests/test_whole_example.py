"""Thin whole models with which an import is tried: their ids, and their logits."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from published_images import FOLDERS
from transformers import LlavaForConditionalGeneration

from mimo.hooks import ConfigError
from mimo_transformers import HfImagesConfig
from mimo_transformers.family import config_of
from mimo_transformers.weights import IMAGES
from mimo_transformers.whole.example import write_example


def encoder_of(name: str) -> HfImagesConfig:
    """Return the settings that a small published folder means."""
    folder = FOLDERS[name]
    family = IMAGES.of(folder.config["model_type"])
    assert family is not None
    files = {"preprocessor_config.json": folder.preprocessor, "processor_config.json": folder.processor}
    given = dict(family.settings({**folder.config, **files}))
    return HfImagesConfig(**{**given, "null": tuple(given["null"])})


def test_ids_stay_apart_and_fit_a_small_vocabulary(tmp_path: Path) -> None:
    """Those of sections and lists too; words are none of them, and the folder loads."""
    text = {**FOLDERS["llava"].config["text_config"], "vocab_size": 64000, "eos_token_id": [2, 63999]}
    library = config_of("llava", {**FOLDERS["llava"].config, "text_config": text, "image_token_index": 32000})
    example = write_example(encoder_of("llava"), library, tmp_path)
    with contextlib.redirect_stderr(io.StringIO()):
        model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.config.image_token_id == example.placeholder
    assert example.words == range(example.placeholder + 1, 97)
    assert model.get_input_embeddings().num_embeddings == 97
    tokens = [*example.words[:3], *[example.placeholder] * 16, example.words[3]]
    image = example.items[0]
    one = example.logits(tokens, [image])
    pixels = encoder_of("llava").processing.prepare(image)["pixels"]
    with torch.no_grad():
        other = model(input_ids=torch.tensor([tokens]), pixel_values=pixels).logits[0]
    assert one.shape == (20, 97)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_a_model_without_an_id_for_images_is_refused(tmp_path: Path) -> None:
    """Since nothing says where its rows lie in a text."""
    library = config_of("minicpmv4_6", {})
    with pytest.raises(ConfigError, match="expected image_token_id or image_token_index, the id of one row of an imag"):
        write_example(encoder_of("llava"), library, tmp_path)
