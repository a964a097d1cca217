"""The published families of this package's plugins: all of their kind that the installed library knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mimo.model import HfExample, HfFamilies, HfFamily, HfWhole
from mimo_transformers.family import (
    HfDecoderConfig,
    HfEncoderConfig,
    causal_class,
    causal_types,
    config_of,
    dropout_keys,
    image_text_class,
    image_text_types,
    is_causal,
    is_image_text,
    is_tower,
    new_network,
    tower_class,
    tower_types,
)
from mimo_transformers.weights.settings import (
    PREPARING,
    decoder_settings,
    describe,
    image_settings,
    library_of,
    settings_from,
)
from mimo_transformers.weights.tested import known

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from mimo.model import HfTensor
    from mimo_transformers.whole.config import HfImagesConfig


_TEXT = "text_config"

_HEADLESS = (
    "transformers has no class of this family that reads text alone and has a head: {0} gives hidden rows, of which "
    "lm_head.weight, or where it is tied model.embed_tokens.weight, makes the logits"
)


def _of(model_type: str) -> HfFamily | None:
    if not is_causal(model_type):
        return None
    return _family(
        model_type,
        causal_class(config_of(model_type, {})),
        settings=decoder_settings,
        tensors=_decoder_tensors,
        # Alone; in a composed model as transformers before 5 wrote it, and since.
        renamed=({}, {"": "language_model."}, {"model.": "model.language_model."}, {"model.": "model.text_model."}),
        copies=_copies,
    )


def _of_tower(model_type: str) -> HfFamily | None:
    if not is_tower(model_type):
        return None
    return _family(
        model_type,
        tower_class(config_of(model_type, {})),
        settings=settings_from,
        tensors=_tower_tensors,
        renamed=(
            {},
            {"": "vision_tower."},
            {"": "model.vision_tower."},
            {"": "vision_model."},
            {"": "model.vision_model."},
        ),
        copies=lambda _config: {},
    )


def _of_image_text(model_type: str) -> HfFamily | None:
    if not is_image_text(model_type):
        return None
    return _family(
        model_type,
        image_text_class(config_of(model_type, {})),
        settings=image_settings,
        tensors=_image_tensors,
        # As it is written; where the library has the model's own names; as towers were before transformers 5.
        renamed=(
            {},
            {"": "model."},
            {"vision_tower.": "vision_tower.vision_model."},
            {"": "model.", "vision_tower.": "model.vision_tower.vision_model."},
        ),
        copies=lambda _config: {},
        files=PREPARING,
        whole=HfWhole(
            section=_TEXT,
            hidden=_width,
            keys=partial(_language_keys, model_type=model_type),
            settings=_language_settings,
            names=_language_names,
            tokenizer=_tokenizer,
            example=partial(_example, model_type=model_type),
        ),
    )


def _family(
    model_type: str,
    made: Any,
    *,
    settings: Callable[..., Mapping[str, Any]],
    tensors: Callable[[Any], Sequence[HfTensor]],
    renamed: Sequence[Mapping[str, str]],
    copies: Callable[[Any], Mapping[str, str]],
    files: Sequence[str] = (),
    whole: HfWhole | None = None,
) -> HfFamily:
    needless = [re.compile(pattern) for pattern in made._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001 - what the library passes over
    dropout = dropout_keys(config_of(model_type, {}).to_dict())
    return HfFamily(
        model_type=model_type,
        architecture=made.__name__,
        settings=partial(settings, model_type=model_type, dropout=dropout),
        describe=describe,
        tensors=tensors,
        renamed=renamed,
        ignored=("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias", "*.position_ids"),
        needless=lambda name: any(pattern.search(name) for pattern in needless),
        constants=_constants,
        copies=copies,
        dropout=dropout,
        files=files,
        whole=whole,
        export_note=_HEADLESS.format(made.__name__) if made.__name__.endswith("TextModel") else "",
    )


def _decoder_tensors(config: HfDecoderConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import decoder_table

    return decoder_table(config)


def _tower_tensors(config: HfEncoderConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import tower_table

    return tower_table(config)


def _image_tensors(config: HfImagesConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import images_table

    return images_table(config)


def _constants(config: HfDecoderConfig | HfEncoderConfig | HfImagesConfig) -> Mapping[str, Tensor]:
    from mimo_transformers.weights.table import constants

    return constants(config)


def _language_names(config: HfImagesConfig) -> frozenset[str]:
    from mimo_transformers.weights.table import language_names

    return language_names(config)


def _width(config: HfImagesConfig) -> int:
    from mimo_transformers.whole.trial import width_of

    return width_of(config)


def _language_keys(described: Mapping[str, Any], *, model_type: str) -> Mapping[str, Any]:
    """Return what a whole model decides of its language model, whose own section may say something else."""
    from mimo_transformers.whole.heads import left_out

    said = {key: one for key, one in described.items() if key not in PREPARING}
    library = library_of(said, model_type)
    return {"tie_word_embeddings": bool(getattr(library, "tie_word_embeddings", False)), **left_out(library)}


def _language_settings(config: HfImagesConfig) -> Mapping[str, Any]:
    from mimo_transformers.whole.seeing import sees_items
    from mimo_transformers.whole.trial import tried_of

    more = tried_of(config).parts - 1
    return {**({"bidirectional_items": True} if sees_items(config) else {}), **({"deepstack": more} if more else {})}


def _tokenizer(config: HfImagesConfig) -> Mapping[str, Mapping[str, str]]:
    """Return what a tokenizer's settings say about images."""
    images = config.processing
    found = {"placeholders": {"image": images.placeholder}}
    if images.marker != images.placeholder:
        found["markers"] = {"image": images.marker}
    if images.before or images.after:
        found["items"] = {"image": f"{images.before}{images.placeholder}{images.after}"}
    return found


def _example(config: HfImagesConfig, described: Mapping[str, Any], folder: Path, *, model_type: str) -> HfExample:
    from mimo_transformers.whole.example import write_example

    said = {key: one for key, one in described.items() if key not in PREPARING}
    return write_example(config, library_of(said, model_type), folder)


def _copies(config: HfDecoderConfig) -> Mapping[str, str]:
    """Return the names of a tied output embedding, which a folder may hold once more."""
    if not config.tied:
        return {}
    from mimo.model.runtime import create_on

    with create_on("meta"):
        network = new_network(config.library())
    names = {part: path for path, part in network.named_modules()}
    ends = [names[end()] for end in (network.get_output_embeddings, network.get_input_embeddings)]
    return {f"{ends[0]}.weight": f"{ends[1]}.weight"}


def _families(of: Callable[[str], HfFamily | None], listed: Callable[[], Sequence[str]]) -> HfFamilies:
    return HfFamilies(of=of, type_of=lambda config: str(config.model_type), known=listed)


CAUSAL = _families(_of, partial(known, "hf-decoder", causal_types, is_causal))
"""Every language model of the installed library."""
IMAGES = _families(_of_image_text, image_text_types)
"""Every whole image-text model of it, of which the half that makes rows of images is meant; few are recorded."""
TOWERS = _families(_of_tower, partial(known, "hf-encoder", tower_types, is_tower))
"""Every model of it that sees pictures of one size."""
