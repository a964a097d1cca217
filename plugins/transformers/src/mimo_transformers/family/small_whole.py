"""Small configs of any model of the library, of whole image-text models too, whose parts must fit together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mimo_transformers.family.image_text import SECTIONS
from mimo_transformers.family.small_keys import PATCHES, layer_kinds, small_image, small_keys, small_sizes

_LAYERS = 2
"""Of the language model and of the tower, where these don't need more."""
_PATCH = 4
_WIDTH = 32
"""Of rows, as `small_keys` has it: what leads from one part to another is as wide."""
_ROWS: Mapping[str, int] = {"num_image_tokens": PATCHES**2, "mm_tokens_per_image": (PATCHES // 2) ** 2}
"""Of an image."""
_SMALL: Mapping[str, int] = {
    **_ROWS,
    # widths between parts
    "out_hidden_size": _WIDTH,
    "embed_dim": _WIDTH,
    "projection_dim": _WIDTH,
    "image_token_embed_dim": _WIDTH,
    "projector_hidden_size": 24,
    # inside of towers
    "num_heads": 4,
    "mlp_dim": 24,
    "output_channels": 16,
    "num_position_embeddings": PATCHES**2,
    # codes of images that are generated; normed in groups of 32
    "num_embeddings": 8,
    "base_channels": 32,
    "latent_channels": 32,
}
_OF_WHOLE: Mapping[str, int] = {**_SMALL, "hidden_size": _WIDTH, "vocab_size": 97}
"""Some whole models say again what their language model says."""
_DEEP = "deepstack_visual_indexes"
"""Layers of a tower from which rows go to as many first layers of the language model."""
_OF_LAST = ("fullatt_block_indexes", "global_attn_indexes")
"""Layers of a tower that see all of an image, as the last one does; the others see windows."""
_JOINED = ("depths", "output_channels", "rope_parameters")
"""What a tower has whose ``image_size`` is of many patches: layers join them, or it is only the largest."""
_FEATURES = ("vision_feature_layer", "vision_feature_layers")
_IDS = ("_token_id", "_token_index")
"""Ends the names of keys that say ids."""
_NOT_SAID = ("transformers_version", "dtype", "architectures")


def shrink(config: Any, **changes: Any) -> dict[str, Any]:
    """Return the keys of a small ``config.json`` of the same family as a config of the library.

    Widths, heads, layers, experts, windows and vocabulary become small, each where the family has it; which layers are
    of which kind, and all else, stays. Of a whole image-text model each part becomes so, rows of the tower are as wide
    as those of the language model, layers from which rows are taken exist, images are of a few patches of 4 x 4 pixels,
    and ids of tokens are among the first.

    Args:
        config: of the library.
        changes: other values of keys; of a part of a whole model, as ``text_config``, those of some of its keys, from
            which nothing in other parts follows.
    """
    if not config.sub_configs.keys() >= SECTIONS:
        return small_keys(config, **changes)
    keys, text = config.to_dict(), config.text_config
    deep = len(getattr(config.vision_config, _DEEP, None) or ())
    layers = max(_LAYERS, deep + 1)
    others = [name for name in config.sub_configs if name != "text_config" and getattr(config, name) is not None]
    parts = {name: _small_part(getattr(config, name), layers) for name in others}
    text_changes = {"num_hidden_layers": max(layers, layer_kinds(text)), **changes.pop("text_config", {})}
    parts["text_config"] = {**small_sizes(text.to_dict(), _ROWS), **small_keys(text, **text_changes)}
    found = {**_small_ids(keys), **small_sizes(keys, _OF_WHOLE), **_small_rows(keys, parts["vision_config"], layers)}
    for name, small in parts.items():
        section = getattr(config, name)
        said = {key: one for key, one in section.to_diff_dict().items() if _is_said(key)}
        found[name] = {"model_type": section.model_type, **said, **small, **changes.pop(name, {})}
    plain: dict[str, Any] = json.loads(json.dumps({**found, **changes}))
    return plain


def _small_part(config: Any, layers: int) -> dict[str, Any]:
    """Return the keys of a small tower, or of another part of a whole model that is no language model."""
    keys = config.to_dict()
    found = {**small_keys(config, num_hidden_layers=layers), **small_sizes(keys, {**_SMALL, "depth": layers})}
    found |= _of_patches(keys)
    found |= {key: [layers - 1] for key in _OF_LAST}
    found |= {_DEEP: list(range(len(keys.get(_DEEP) or ()))), "channel_multiplier": [1]}
    return {key: one for key, one in found.items() if key in keys}


def _of_patches(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in pixels of a small tower: of patches, of images, and of windows of two joined patches."""
    size, found = keys.get("patch_size"), dict[str, Any]()
    if size is not None:
        found["patch_size"] = [_PATCH] * len(size) if isinstance(size, list | tuple) else _PATCH
    if keys.get("image_size"):
        found["image_size"] = small_image({**keys, **found}, joined=any(key in keys for key in _JOINED))
    if "spatial_merge_size" in keys:
        found["window_size"] = 2 * keys["spatial_merge_size"] * _PATCH
    return found


def _small_rows(keys: Mapping[str, Any], tower: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return what a small whole model says of the rows of an image.

    Args:
        keys: of the large one.
        tower: of the small one.
        layers: how many the tower has, before the first of which there are rows, too.
    """
    found = {}
    for key in _FEATURES:
        if keys.get(key) is not None:
            said = keys[key] if isinstance(keys[key], list | tuple) else [keys[key]]
            held = [*dict.fromkeys(min(max(one, -layers - 1), layers) for one in said)]
            found[key] = held if isinstance(keys[key], list | tuple) else held[0]
    if "image_seq_length" in keys:
        found["image_seq_length"] = int(PATCHES * keys.get("downsample_ratio", 1)) ** 2
    if keys.get("image_grid_pinpoints"):
        large, small = keys["vision_config"]["image_size"], tower["image_size"]
        grids = keys["image_grid_pinpoints"]
        found["image_grid_pinpoints"] = [[side // large * small for side in grid] for grid in grids]
    return found


def _small_ids(keys: Mapping[str, Any]) -> dict[str, int]:
    """Return other ids for those that keys say, all different; 0 is the language model's."""
    ids = [key for key, one in keys.items() if key.endswith(_IDS) and isinstance(one, int) and _is_said(key)]
    return {key: number for number, key in enumerate(ids, 1)}


def _is_said(key: str) -> bool:
    return key not in _NOT_SAID and not key.startswith("_")
