"""The settings that a ``config.json`` of the library means, and the other way round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mimo.hooks import ConfigError
from mimo.model import hf_no_dropout
from mimo_transformers.family import HfConfig, config_of, refused_rates

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
_TAG = "__float__"
"""Only key of the table that stands for a number in a ``config.json`` of the library."""
_TAGGED = ("NaN", "Infinity", "-Infinity")
PREPARING = ("preprocessor_config.json", "processor_config.json")
"""Files beside a ``config.json`` that say how images are prepared."""


def settings_from(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that the keys of a ``config.json`` mean: what isn't as in the library."""
    hf_no_dropout(keys, [key for key in refused_rates(keys) if key in dropout])
    library = library_of(keys, model_type)
    whole = library.to_dict()  # a table in it that differs is kept whole
    said = {key: whole[key] for key in library.to_diff_dict() if key in whole and _is_said(key, _NOT_OURS)}
    null: list[str] = []
    values = _without_null(json.loads(json.dumps(said, default=str)), "", null)
    return {"model_type": model_type, "values": values, "null": sorted(null)}


def library_of(keys: Mapping[str, Any], model_type: str) -> Any:
    """Return the library's config of the keys of a ``config.json``."""
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


def decoder_settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the same of a language model, with its vocabulary."""
    said = settings_from(keys, model_type=model_type, dropout=dropout)
    return {**said, "vocabulary": library_of(keys, model_type).vocab_size}


def image_settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that a folder of a whole model means; of its language model no more than its width."""
    from mimo_transformers.image_files import processing_of
    from mimo_transformers.whole.processing import settings_of

    described = {key: one for key, one in keys.items() if key not in PREPARING}
    preprocessor, processor = (keys.get(name) or {} for name in PREPARING)
    said = settings_from(described, model_type=model_type, dropout=dropout)
    library = library_of(described, model_type)
    null = [path for path in said["null"] if path.partition(".")[0] not in _SECTIONS]
    values = {key: one for key, one in said["values"].items() if key not in _SECTIONS}
    for section in _SECTIONS:
        inside = getattr(library, section)
        more = settings_from(inside.to_dict(), model_type=inside.model_type, dropout=())
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


def describe(config: HfConfig) -> Mapping[str, Any]:
    """Return what the library's own ``save_pretrained`` writes, but for keys that are others' to say."""
    said = config.library().to_diff_dict()
    kept = {key: _changed(value, _tagged) for key, value in said.items() if _is_said(key, _NOT_OURS - {"vocab_size"})}
    described: Mapping[str, Any] = json.loads(json.dumps(kept, default=str))
    return described
