"""What the keys of a published ``config.json`` say of rotary positions, and what ``decoder`` calls that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.model.decoder.config import DecoderConfig
from mimo.model.spec import HfKeys, hf_number, hf_only, hf_real, hf_refused

_SCALING = {
    "rope_factor": "factor",
    "rope_low_factor": "low_freq_factor",
    "rope_high_factor": "high_freq_factor",
    "rope_original_tokens": "original_max_position_embeddings",
}
_SCALED_BY: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": tuple(_SCALING),
}
_LARGEST_BASE = 1e15  # of rotary positions; published ones are 1e11 at most
_LARGEST_FACTOR = 1e6  # by which positions are stretched


@attrs.frozen
class Grids:
    """How a family turns rows of images by three positions.

    Args:
        section: turned pairs of each, where a folder names none.
        interleaved: whether pairs take turns.
    """

    section: tuple[int, ...]
    interleaved: bool


def read_rope(keys: HfKeys, *, grids: Grids | None) -> dict[str, Any]:
    """Return what ``rope_scaling`` says and ``rope_theta`` beside it, or ``rope_parameters`` since transformers 5."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.get(name) or {}
    for kind, inner in rope.items():
        if isinstance(inner, Mapping):
            raise hf_refused(f"{name}.{kind}", "the same positions in all layers", inner)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not grids:
        hf_only(rope, "mrope_section", [[]])
    elif kind == "mrope":  # the name that Qwen2-VL's folders have for it
        kind = "default"
    if kind not in _SCALED_BY:
        raise hf_refused(f"{name}.rope_type", f"one of {', '.join(_SCALED_BY)}", kind)
    hf_only({"partial_rotary_factor": keys.get("partial_rotary_factor"), **rope}, "partial_rotary_factor", [1.0])
    interleaved = grids is not None and grids.interleaved
    hf_only(rope, "mrope_interleaved", [interleaved])
    base = hf_real({"rope_theta": keys["rope_theta"], **rope}, "rope_theta", low=1, most=_LARGEST_BASE)
    section = () if grids is None else _read_section({"mrope_section": grids.section, **rope}, name)
    turned = {"mrope_section": section, "mrope_interleaved": interleaved}
    return {"rope_theta": base, **turned, **_read_stretch(keys, rope, name, kind)}


def _read_section(rope: HfKeys, name: str) -> tuple[int, ...]:
    """Return how many turned pairs follow each of the three positions."""
    section = rope["mrope_section"]
    where = f"{name}.mrope_section"
    if not isinstance(section, list | tuple):
        raise hf_refused(where, "whole numbers", section)
    return tuple(hf_number({where: turned}, where, low=0) for turned in section)


def _read_stretch(keys: HfKeys, rope: HfKeys, name: str, kind: str) -> dict[str, Any]:
    """Return by what positions are stretched, nothing where they are not."""
    if kind == "default":
        return {}
    given = {"original_max_position_embeddings": keys.get("max_position_embeddings"), **rope}
    if keys.get("original_max_position_embeddings") is not None:  # which transformers puts above the one in there
        given["original_max_position_embeddings"] = keys["original_max_position_embeddings"]
    found: dict[str, Any] = {"rope_scaling": kind}
    for ours in _SCALED_BY[kind]:
        where = f"{name}.{_SCALING[ours]}"
        value = {where: given.get(_SCALING[ours])}
        if value[where] is None:
            raise hf_refused(where, f"a number, as rope_type {kind!r} needs it", None)
        if ours == "rope_original_tokens":
            found[ours] = hf_number(value, where)
        else:
            least = 1 if ours == "rope_factor" else 0
            found[ours] = hf_real(value, where, low=least, most=_LARGEST_FACTOR, above=not least)
    if kind == "llama3" and found["rope_high_factor"] <= found["rope_low_factor"]:
        expected = f"more than low_freq_factor = {found['rope_low_factor']}"
        raise hf_refused(f"{name}.high_freq_factor", expected, rope["high_freq_factor"])
    return found


def write_rope(config: DecoderConfig, more: HfKeys) -> dict[str, Any]:
    """Return positions in both spellings: a reader that doesn't know one of them must not turn otherwise."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    rope = {"rope_type": kind, **{_SCALING[ours]: getattr(config, ours) for ours in _SCALED_BY[kind]}, **more}
    return {
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_scaling": rope if len(rope) > 1 else None,
        "rope_theta": config.rope_theta,
    }
