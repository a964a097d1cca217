"""The published families of ``hf-decoder``: every language model that the installed library knows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mimo.hooks import ConfigError
from mimo.model import HfFamilies, HfFamily, hf_no_dropout
from mimo_transformers.family import HfDecoderConfig, causal_class, config_of, is_causal, new_network

if TYPE_CHECKING:
    from mimo.model import HfTensor

_NOT_OURS = frozenset(
    {
        *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "vocab_size"),
        *("_name_or_path", "_attn_implementation_autoset", "use_cache", "return_dict", "quantization_config"),
        *("output_attentions", "output_hidden_states"),
    }
)
"""Keys of a ``config.json`` that say nothing of what is computed, or that a setting of its own says."""

_DROPOUT = re.compile(r"^(?!classifier|summary).*(drop|dropout|dropout_prob|dropout_rate)$")
"""Keys that drop something at random, but for heads that no language model has."""


def _of(model_type: str) -> HfFamily | None:
    if not is_causal(model_type):
        return None
    cls = causal_class(config_of(model_type, {}))
    needless = [re.compile(pattern) for pattern in cls._keys_to_ignore_on_load_unexpected or ()]
    dropout = [key for key in config_of(model_type, {}).to_dict() if _DROPOUT.search(key)]
    return HfFamily(
        model_type=model_type,
        architecture=cls.__name__,
        settings=partial(_settings, model_type=model_type, dropout=dropout),
        describe=_describe,
        tensors=_tensors,
        # Alone; in a composed model as transformers before 5 wrote it, and since.
        renamed=({}, {"": "language_model."}, {"model.": "model.language_model."}, {"model.": "model.text_model."}),
        ignored=("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias"),
        needless=lambda name: any(pattern.search(name) for pattern in needless),
        copies=_copies,
        dropout=dropout,
    )


def _settings(keys: Mapping[str, Any], *, model_type: str, dropout: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that the keys of a ``config.json`` mean: what isn't as in the library."""
    hf_no_dropout(keys, dropout)
    library = config_of(
        model_type, {key: value for key, value in keys.items() if key not in _NOT_OURS - {"vocab_size"}}
    )
    whole = library.to_dict()  # a table in it that differs is kept whole
    said = {key: whole[key] for key in library.to_diff_dict() if key in whole and _is_said(key, _NOT_OURS)}
    plain = json.loads(json.dumps(said, default=str))
    null: list[str] = []
    values = _without_null(plain, "", null)
    return {"model_type": model_type, "vocabulary": library.vocab_size, "values": values, "null": sorted(null)}


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


def _describe(config: HfDecoderConfig) -> Mapping[str, Any]:
    said = config.library().to_dict()
    kept = {key: value for key, value in said.items() if _is_said(key, _NOT_OURS - {"vocab_size"})}
    described: Mapping[str, Any] = json.loads(json.dumps(kept, default=str))
    return described


def _tensors(config: HfDecoderConfig) -> Sequence[HfTensor]:
    from mimo_transformers.weights.table import hf_table

    return hf_table(config)


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


CAUSAL = HfFamilies(of=_of, type_of=lambda config: str(config.model_type))
"""Every language model of the installed library."""
