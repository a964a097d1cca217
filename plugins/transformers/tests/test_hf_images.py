"""`hf-images` against the library's whole models, and its layouts against the whole."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from published_images import FOLDERS
from small_models import is_older
from torch.nn import functional

from mimo.hooks import ConfigError
from mimo.model.attention import padded
from mimo.model.testing import ModuleLayout, assert_conforms, assert_layouts
from mimo_transformers import HF_IMAGES, HfImagesConfig
from mimo_transformers.family import half_of, new_image_text, quiet
from mimo_transformers.weights import IMAGES
from mimo_transformers.whole.packed_images import image_attention, makes_one_call

PICTURES = [Image.effect_noise(size, 80).convert("RGB") for size in ((40, 30), (20, 50), (64, 64))]
WIDTH = 32
"""Of rows of a small model."""


def config_of(name: str, **changes: Any) -> HfImagesConfig:
    """Return the settings that a small published folder means."""
    folder = FOLDERS[name]
    family = IMAGES.of(folder.config["model_type"])
    assert family is not None
    files = {"preprocessor_config.json": folder.preprocessor, "processor_config.json": folder.processor}
    given = dict(family.settings({**folder.config, **files}))
    return HfImagesConfig(**{**given, "null": tuple(given["null"]), **changes})


@pytest.mark.newest
@pytest.mark.parametrize("name", ["llava_next", pytest.param("qwen2_vl", marks=pytest.mark.soak)])
def test_it_keeps_the_promises_of_an_encoder(name: str) -> None:
    """The conformance kit finds rows, empty batches, initial values and tensor ranks in order."""
    config = config_of(name)
    assert_conforms(HF_IMAGES, PICTURES, config=config, hidden=WIDTH)


@pytest.mark.newest
def test_layouts_compute_what_the_whole_does() -> None:
    """Tensor ranks and recomputation, with and without images."""
    config = config_of("internvl")
    layouts = [ModuleLayout(tp=2), ModuleLayout(recompute="full")]
    assert_layouts(HF_IMAGES, [PICTURES, PICTURES[:1], []], layouts, config=config, hidden=WIDTH)


def test_what_is_frozen_is_the_tower_or_what_lies_behind_it() -> None:
    """A merger inside of the library's tower counts as projector, as does a row of its own in the base model."""
    made = {name: HF_IMAGES.build(config_of(name), WIDTH) for name in ("qwen2_vl", "llava_next")}
    behind = {
        name: {path.split(".")[1] for path, _ in one.named_parameters() if path.startswith("projector.")}
        for name, one in made.items()
    }
    assert behind == {"qwen2_vl": {"merger"}, "llava_next": {"multi_modal_projector", "image_newline"}}
    assert all(
        path.startswith(("encoder.", "projector.")) for one in made.values() for path, _ in one.named_parameters()
    )


def test_values_are_drawn_as_the_library_draws_them() -> None:
    """Of the tower by the tower's own class: a scale of ones, positions that aren't zero."""
    encoder: Any = HF_IMAGES.build(config_of("llava"), WIDTH)
    held = dict(encoder.named_parameters())
    assert bool((held["encoder.post_layernorm.weight"] == 1).all())
    assert 0 < float(held["encoder.embeddings.position_embedding.weight"].detach().std()) < 1
    assert all(bool(one.isfinite().all()) for one in held.values())


def test_rows_for_later_layers_stand_beside_the_others() -> None:
    """Qwen3-VL's tower makes such rows: an encoder that kept them back would train another model."""
    config = config_of("qwen3_vl")
    encoder: Any = HF_IMAGES.build(config, 4 * WIDTH)
    items = [HF_IMAGES.prepare(config, image) for image in PICTURES]
    with quiet(), torch.no_grad():
        whole = new_image_text(config.library()).eval()
        encoder.read(whole)
        sizes = [(image.height, image.width) for image in PICTURES]
        given = config.processing.collate([{"pixels": item["pixels"]} for item in items], sizes)
        wanted = half_of(whole).base.get_image_features(**given)
        found = encoder(items)
    assert torch.allclose(found[:, :WIDTH], torch.cat(tuple(wanted.pooler_output)), atol=1e-6)
    every = [one if isinstance(one, torch.Tensor) else torch.cat(tuple(one)) for one in wanted.deepstack_features]
    assert len(every) == 3
    assert torch.allclose(found[:, WIDTH:], torch.cat(every, dim=1), atol=1e-6)  # older ones don't split them


@pytest.mark.parametrize(
    ("name", "is_one"), [("qwen2_5_vl", True), ("mistral3", not is_older("5.23")), ("llava", False)]
)
def test_images_and_windows_go_through_one_call_of_attention(name: str, is_one: bool) -> None:
    """Where the library would loop over them, or mask all rows of all images; towers of one size have batches.

    Older ones say of Pixtral's rows where they lie, and not whose they are.
    """
    config = config_of(name)
    encoder: Any = HF_IMAGES.build(config, WIDTH)
    encoder([HF_IMAGES.prepare(config, image) for image in PICTURES])
    assert makes_one_call(encoder.encoder) == is_one


def test_attention_without_segments_is_to_all_rows_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of packed rows, which on GPUs leave out the one that writes down all scores."""
    query, key, value = (torch.randn(3, 4, 5, 12) for _ in range(3))
    wanted = functional.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2)
    monkeypatch.setattr(padded, "needs_alignment", lambda _query: True)
    allowed: list[bool] = []
    attention = functional.scaled_dot_product_attention

    def noted(*rows: Any, **how: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.math_sdp_enabled())
        return attention(*rows, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    found, _ = image_attention(torch.nn.Identity(), query, key, value, scaling=0.3)
    torch.testing.assert_close(found, wanted)
    assert allowed == [False]
    mask = torch.randn(5, 5)
    wanted = attention(query, key, value, attn_mask=mask, scale=0.3).transpose(1, 2)
    masked, _ = image_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(masked, wanted)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llama"}, r"config.model_type: expected a model of images and text, got 'llama'"),
        ({"images": {}}, r"config.images.kind: expected one of fixed, .*, got None. `mimo checkpoint import-hf DIR`"),
        ({"images": {"kind": "fixed", "mena": 1}}, r"config.images.mena: expected a key of 'fixed', .* mean 'mean'\?"),
        ({"images": {"kind": "patches", "patch": "4"}}, r"config.images.patch: expected a whole number, got '4'"),
        ({"images": {"kind": "fixed"}}, r"config.images.marker: expected a text, got nothing"),
    ],
)
def test_settings_are_refused_by_their_path(changes: dict[str, Any], text: str) -> None:
    """Before anything is built."""
    with pytest.raises(ConfigError, match=text):
        HF_IMAGES.build(config_of("llava", **changes), WIDTH)


def test_rows_of_another_number_are_refused() -> None:
    """Settings of images that aren't the model's would put its rows into other places."""
    config = config_of("llava")
    wrong = config_of("llava", images={**config.images, "image_rows": 5})
    text = r"^config.images.image_rows: expected 16 rows of an image of 56 x 84, as 'llava' makes, got 5\. `mimo check"
    with pytest.raises(ConfigError, match=text):
        HF_IMAGES.build(wrong, WIDTH)
    tiles = config_of("internvl")
    wrong = config_of("internvl", images={**tiles.images, "tile_rows": 5})
    with pytest.raises(ConfigError, match=r"^config.images: expected \d+ rows of .* as 'internvl' makes, got \d+"):
        HF_IMAGES.build(wrong, WIDTH)
    with pytest.raises(
        ConfigError, match="expected a language model that takes rows of 32, got one that takes rows of 8"
    ):
        HF_IMAGES.build(config, 8)


def test_models_without_two_halves_are_refused() -> None:
    """Mllama's layers read images by cross-attention."""
    config = config_of("llava", model_type="mllama", values={}, null=())
    with pytest.raises(ConfigError, match="got 'mllama' with no get_image_features"):
        HF_IMAGES.build(config, WIDTH)


def test_rows_that_are_not_as_wide_as_the_text_are_refused() -> None:
    """A folder whose tower and language model don't belong together is refused by what differs."""
    config = config_of("qwen2_5_vl")
    values = json.loads(json.dumps(config.values))
    values["vision_config"]["out_hidden_size"] = config.hidden // 2
    with pytest.raises(ConfigError) as refused:
        HF_IMAGES.build(attrs.evolve(config, values=values), config.hidden)
    assert str(refused.value) == (
        "config.model_type: expected an image-text model of transformers of which each image makes rows by itself, got "
        "'qwen2_5_vl' with rows of another width than text_config.hidden_size. plugins/transformers/README.md lists "
        "those that can be trained."
    )


def test_what_a_whole_model_says_of_its_text_may_be_left_out() -> None:
    """BLIP-2 says nothing of tied embeddings, which are then two; Gemma 3 ties them by default."""
    said = {}
    for model_type in ("blip-2", "gemma3"):
        family = IMAGES.of(model_type)
        assert family is not None
        assert family.whole is not None
        said[model_type] = family.whole.keys({"model_type": model_type})
    assert said == {"blip-2": {"tie_word_embeddings": False}, "gemma3": {"tie_word_embeddings": True}}
