"""The library's own classes, by the ``model_type`` of a ``config.json``. No code of a folder is ever looked for."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from mimo.hooks import ConfigError
from mimo_transformers.family.headed import TEXT, with_head

ATTENTION = "mimo_packed_rows"
"""Name under which our attention over packed rows is registered; one with "flash" in it would be fetched."""

_TEXT_MODEL = "TextModel"
"""Ends the names of classes of text models of composed ones."""
_OF_PICTURES = ("image_size", "num_channels", "patch_size", "in_channels", "in_chans")
"""Keys of which the config of a model that sees pictures has some."""


def config_of(model_type: str, values: Mapping[str, Any], *, where: str = "modules.language.config") -> Any:
    """Return the library's config of a model type with these keys of a ``config.json``.

    Args:
        model_type: of it.
        values: its other keys.
        where: path of the settings that say both.

    Raises:
        ConfigError: the type is unknown, or its class takes no such values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
        raise ConfigError(
            f"{where}.model_type",
            expected="one that the installed transformers knows",
            got=repr(model_type),
            fix=f"Did you mean {near[0]!r}?" if near else "Install a transformers that knows it.",
        )
    try:
        with quiet():
            return CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # the library's validators raise errors of many kinds
        raise ConfigError(
            f"{where}.values",
            expected=f"what a config of {model_type!r} takes",
            got=f"{type(error).__name__}: {error}",
        ) from error


def types_of(names: Iterable[str], mapping: Iterable[Any]) -> set[str]:
    """Return the model types of which one of the library's mappings has a class, those that were registered too.

    Args:
        names: the library's own, as ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``; several may share one class of configs.
        mapping: by class of configs, as ``MODEL_FOR_CAUSAL_LM_MAPPING``. No other configs are imported.
    """
    return {*names, *(config.model_type for config in mapping)}


def registered_types() -> list[str]:
    """Return the model types that were registered with the library in this process, beside its own.

    There are none where nobody has imported it, which takes a second.
    """
    auto: Any = sys.modules.get("transformers.models.auto.configuration_auto")
    return [] if auto is None else [one for one in auto.CONFIG_MAPPING.keys() if one not in auto.CONFIG_MAPPING_NAMES]  # noqa: SIM118 - an iterator of it makes every config


def is_causal(model_type: str) -> bool:
    """Tell whether the library has a class for a model type that predicts the next token and is of text alone.

    The text of a composed model that reads images is one with a head that is put on it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type].sub_configs:
        return False
    return CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING or _text_class(model_type) is not None


def is_text_of_grids(config: Any) -> bool:
    """Tell whether it is the text of a composed model whose rows may turn by three positions.

    Args:
        config: of the library, or its class.
    """
    if config.sub_configs:
        return False
    keys = {*getattr(config, "ignore_keys_at_rope_validation", ()), *(getattr(config, "rope_parameters", None) or ())}
    return "mrope_section" in keys


@cache
def _text_class(model_type: str) -> Any:
    """Return the library's text model, without a head, of a composed model that reads images; None if it isn't one."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_MAPPING

    made: Any = CONFIG_MAPPING[model_type]
    if is_text_of_grids(made) and made in MODEL_MAPPING:
        return MODEL_MAPPING[made]
    if not model_type.endswith(TEXT) or model_type.removesuffix(TEXT) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return None
    beside = vars(importlib.import_module(made.__module__.replace("configuration_", "modeling_")))
    models = {one for one in beside.values() if isinstance(one, type) and issubclass(one, PreTrainedModel)}
    texts = [one for one in models if one.config_class is made and one.__name__.endswith(_TEXT_MODEL)]
    return texts[0] if len(texts) == 1 else None


def causal_types() -> list[str]:
    """Return every model type of which `is_causal`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    texts = (one for one in CONFIG_MAPPING if one.endswith(TEXT))
    return sorted(
        filter(is_causal, {*types_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING), *texts})
    )


@cache
def keys_of(model_type: str) -> frozenset[str]:
    """Return the keys that a config of a known model type has, other names of them too."""
    library = config_of(model_type, {})
    return frozenset({*library.to_dict(), *library.attribute_map})


def causal_class(config: Any) -> Any:
    """Return the library's class that predicts the next token for a config, or its text model with a head.

    Raises:
        ConfigError: it has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        if text := _text_class(config.model_type):
            return with_head(text)
        raise ConfigError(
            "modules.language.config.model_type",
            expected="a language model of transformers: one with a class for causal language modelling",
            got=repr(config.model_type),
            fix="plugins/transformers/README.md lists those that can be trained.",
        ) from None


def new_network(config: Any, *, attention: str = ATTENTION) -> Any:
    """Return the library's model of a config, on the device of the caller's context.

    Args:
        config: of the library.
        attention: what its layers call; the library's own is ``eager``.
    """
    return causal_class(config)._from_config(config, attn_implementation=attention)  # noqa: SLF001 - as `AutoModel` does


def base_path_of(network: Any) -> str:
    """Return where the library's model has the one that it puts a head on."""
    from transformers import PreTrainedModel

    prefix = str(network.base_model_prefix)
    if hasattr(network, prefix):
        return prefix
    return next((path for path, part in network.named_children() if isinstance(part, PreTrainedModel)), "")


def is_tower(model_type: str) -> bool:
    """Tell whether the library has a model of a type that sees pictures alone, all of one size."""
    if not _has_pictures(model_type):
        return False
    try:
        made = tower_class(config_of(model_type, {}))
    except ConfigError:
        return False
    return bool(made.main_input_name == "pixel_values") and ".timm_" not in made.__module__  # which fetches by name


def tower_types() -> list[str]:
    """Return every model type that may be one of which `is_tower`; that is known once its class is imported."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

    return sorted(filter(_has_pictures, types_of(MODEL_MAPPING_NAMES, MODEL_MAPPING)))


def _has_pictures(model_type: str) -> bool:
    """Tell whether the library has one model of a type, and its config speaks of pictures."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if model_type not in CONFIG_MAPPING:
        return False
    made: Any = CONFIG_MAPPING[model_type]
    return made in MODEL_MAPPING and not made.sub_configs and any(hasattr(made, key) for key in _OF_PICTURES)


def tower_class(config: Any) -> Any:
    """Return the library's model of a config, without what is put on it for a task.

    Raises:
        ConfigError: it has none, or several.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found: Any = MODEL_MAPPING.get(type(config), None)
    if not isinstance(found, type):
        raise ConfigError(
            "config.model_type",
            expected="a vision tower of transformers that sees images of one size, each by itself",
            got=repr(config.model_type),
            fix="plugins/transformers/README.md lists those that can be trained.",
        )
    return found


def new_tower(config: Any) -> Any:
    """Return the library's model of pictures of a config, on the device of the caller's context."""
    made = tower_class(config)
    return made._from_config(config, attn_implementation="sdpa" if made._supports_sdpa else "eager")  # noqa: SLF001 - as `AutoModel` does


class _Quiet:
    """How many are within `quiet`, and what is put back when the last of them leaves."""

    lock = threading.Lock()
    count = 0
    leave = contextlib.ExitStack()


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what the library logs and warns of while a model is built or tried, in any number of threads."""
    with _Quiet.lock:
        if not _Quiet.count:
            _Quiet.leave.enter_context(_quiet())
        _Quiet.count += 1
    try:
        yield
    finally:
        with _Quiet.lock:
            _Quiet.count -= 1
            if not _Quiet.count:
                _Quiet.leave.close()


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
