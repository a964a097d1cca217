"""The published families of this package's plugins: all of their kind that the installed library knows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mimo.hooks import ConfigError
from mimo.model import HfExample, HfFamilies, HfFamily, HfWhole, hf_no_dropout
from mimo_transformers.family import (
    HfConfig,
    HfDecoderConfig,
    HfEncoderConfig,
    causal_class,
    causal_types,
    config_of,
    image_text_class,
    image_text_types,
    is_causal,
    is_image_text,
    is_tower,
    new_network,
    tower_class,
    tower_types,
)
from mimo_transformers.weights.tested import known, tested

if TYPE_CHECKING:
    from pathlib import Path

    from mimo.model import HfTensor
    from mimo_transformers.whole.config import HfImagesConfig

_NOT_OURS = frozenset(
    {
        *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "vocab_size"),
        *("_name_or_path", "_attn_implementation_autoset", "use_cache", "return_dict", "quantization_config"),
        *("output_attentions", "output_hidden_states", "stage_names", "out_features", "out_indices"),
    }
)
"""Keys of a ``config.json`` that say nothing of what is computed, or that a setting of its own says."""

_TEXT, _VISION = _SECTIONS = ("text_config", "vision_config")
_SHAPES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
"""What of a language model shapes its rows, and what else its config must have to be one."""

_HEADLESS = (
    "transformers has no class of this family that reads text alone and has a head: {0} gives hidden rows, of which "
    "lm_head.weight, or where it is tied model.embed_tokens.weight, makes the logits"
)
_TAG = "__float__"
"""Only key of the table that stands for a number in a ``config.json`` of the library."""
_TAGGED = ("NaN", "Infinity", "-Infinity")

_DROPOUT = re.compile(r"^(?!classifier|summary).*(drop|dropout|dropout_prob|dropout_rate)$")
"""Keys that drop something at random, but for heads that no language model has."""


def _of(model_type: str) -> HfFamily | None:
    if not is_causal(model_type):
        return None
    return _family(
        model_type,
        causal_class(config_of(model_type, {})),
        settings=_decoder_settings,
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
        settings=_settings,
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


_PREPARING = ("preprocessor_config.json", "processor_config.json")
"""Files beside a ``config.json`` that say how images are prepared."""


def _of_image_text(model_type: str) -> HfFamily | None:
    if not is_image_text(model_type):
        return None
    return _family(
        model_type,
        image_text_class(config_of(model_type, {})),
        settings=_image_settings,
        tensors=_image_tensors,
        # As it is written; where the library has the model's own names; as towers were before transformers 5.
        renamed=(
            {},
            {"": "model."},
            {"vision_tower.": "vision_tower.vision_model."},
            {"": "model.", "vision_tower.": "model.vision_tower.vision_model."},
        ),
        copies=lambda _config: {},
        files=_PREPARING,
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
    dropout = [key for key in config_of(model_type, {}).to_dict() if _DROPOUT.search(key)]
    return HfFamily(
        model_type=model_type,
        architecture=made.__name__,
        settings=partial(settings, model_type=model_type, dropout=dropout),
        describe=_describe,
        tensors=tensors,
        renamed=renamed,
        ignored=("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias", "*.position_ids"),
        needless=lambda name: any(pattern.search(name) for pattern in needless),
        copies=copies,
        dropout=dropout,
        files=files,
        whole=whole,
        export_note=_HEADLESS.format(made.__name__) if made.__name__.endswith("TextModel") else "",
    )


def _settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that the keys of a ``config.json`` mean: what isn't as in the library."""
    hf_no_dropout(keys, dropout)
    library = _library(keys, model_type)
    whole = library.to_dict()  # a table in it that differs is kept whole
    said = {key: whole[key] for key in library.to_diff_dict() if key in whole and _is_said(key, _NOT_OURS)}
    null: list[str] = []
    values = _without_null(json.loads(json.dumps(said, default=str)), "", null)
    return {"model_type": model_type, "values": values, "null": sorted(null)}


def _library(keys: Mapping[str, Any], model_type: str) -> Any:
    said = {key: keys[key] for key in keys if _is_said(key, _NOT_OURS - {"vocab_size"})}
    return config_of(model_type, _changed(said, _from_tagged))


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return plain data with each table and number changed, what lies inside of a table first."""
    if isinstance(value, Mapping):
        return change({key: _changed(one, change) for key, one in value.items()})
    return [_changed(one, change) for one in value] if isinstance(value, list | tuple) else change(value)


def _from_tagged(value: Any) -> Any:
    """Return the number that the library writes as a table, as JSON has no infinity."""
    if isinstance(value, Mapping) and set(value) == {_TAG} and value[_TAG] in _TAGGED:
        return float(value[_TAG])
    return value


def _tagged(value: Any) -> Any:
    """Return a number as the library writes it."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {_TAG: next(name for name in _TAGGED if str(float(name)) == str(value))}


def _decoder_settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    said = _settings(keys, model_type=model_type, dropout=dropout)
    return {**said, "vocabulary": _library(keys, model_type).vocab_size}


def _image_settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that a folder of a whole model means; of its language model no more than its width."""
    from mimo_transformers.images import processing_of
    from mimo_transformers.whole.processing import settings_of

    described = {key: one for key, one in keys.items() if key not in _PREPARING}
    preprocessor, processor = (keys.get(name) or {} for name in _PREPARING)
    said = _settings(described, model_type=model_type, dropout=dropout)
    library = _library(described, model_type)
    null = [path for path in said["null"] if path.partition(".")[0] not in _SECTIONS]
    values = {key: one for key, one in said["values"].items() if key not in _SECTIONS}
    for section in _SECTIONS:
        inside = getattr(library, section)
        more = _settings(inside.to_dict(), model_type=inside.model_type, dropout=())
        if section == _VISION:
            kept = more["values"]
            null += [f"{section}.{path}" for path in more["null"]]
        else:
            whole = inside.to_dict()  # an attribute may differ by layer, and not be one
            kept = {key: whole[key] for key in _SHAPES if whole.get(key) is not None}
        values[section] = {**kept, "model_type": inside.model_type}
    images = settings_of(processing_of(described, preprocessor, processor))
    return {"model_type": model_type, "values": values, "null": sorted(null), "images": images}


def _is_said(key: str, others: Collection[str]) -> bool:
    return key not in others and not key.startswith("_")


def _without_null(value: Any, path: str, null: list[str]) -> Any:
    """Return plain data without what is null, the paths of which go into ``null``."""
    if isinstance(value, list) and None in value:
        raise ConfigError(f"config.json: {path}", expected="a list without null", got=repr(value))
    if not isinstance(value, dict):
        return value
    inside = {key: (f"{path}.{key}" if path else key) for key in value}
    null += [inside[key] for key, one in value.items() if one is None]
    return {key: _without_null(one, inside[key], null) for key, one in value.items() if one is not None}


def _describe(config: HfConfig) -> Mapping[str, Any]:
    """Return what the library's own ``save_pretrained`` writes, but for keys that are others' to say."""
    said = config.library().to_diff_dict()
    kept = {key: _changed(value, _tagged) for key, value in said.items() if _is_said(key, _NOT_OURS - {"vocab_size"})}
    described: Mapping[str, Any] = json.loads(json.dumps(kept, default=str))
    return described


def _decoder_tensors(config: HfDecoderConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import decoder_table

    return decoder_table(config)


def _tower_tensors(config: HfEncoderConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import tower_table

    return tower_table(config)


def _image_tensors(config: HfImagesConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import images_table

    return images_table(config)


def _language_names(config: HfImagesConfig) -> frozenset[str]:
    from mimo_transformers.weights.table import language_names

    return language_names(config)


def _width(config: HfImagesConfig) -> int:
    from mimo_transformers.whole.trial import width_of

    return width_of(config)


def _language_keys(described: Mapping[str, Any], *, model_type: str) -> Mapping[str, Any]:
    """Return what a whole model decides of its language model, whose own section may say something else."""
    said = {key: one for key, one in described.items() if key not in _PREPARING}
    return {"tie_word_embeddings": bool(getattr(_library(said, model_type), "tie_word_embeddings", False))}


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

    said = {key: one for key, one in described.items() if key not in _PREPARING}
    return write_example(config, _library(said, model_type), folder)


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


def _families(plugin: str, of: Callable[[str], HfFamily | None], listed: Callable[[], Sequence[str]]) -> HfFamilies:
    return HfFamilies(
        of=of,
        type_of=lambda config: str(config.model_type),
        known=listed,
        tested=partial(tested, plugin),
    )


CAUSAL = _families("hf-decoder", _of, partial(known, "hf-decoder", causal_types))
"""Every language model of the installed library."""
IMAGES = _families("hf-images", _of_image_text, image_text_types)
"""Every whole image-text model of it, of which the half that makes rows of images is meant; few are recorded."""
TOWERS = _families("hf-encoder", _of_tower, partial(known, "hf-encoder", tower_types))
"""Every model of it that sees pictures of one size."""
