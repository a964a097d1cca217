"""Attention of towers over the packed rows of images or windows, in one call where the library would make one for each.

The library asks for that where its attention is called something with "flash" in it, by the first rows of all segments.
Shapes: T rows, N heads, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime import CarriedSegments, Segments, attend, carry

IMAGE_ATTENTION = "mimo_flash_rows"
"""Name under which it is registered; set in a config alone, so that no kernel of this name is looked for."""
_SEGMENTS = "_mimo_segments"
"""Attribute of the first rows of segments: what was made of them, as all layers are given the same."""
_CALLED = "_mimo_one_call"
"""Attribute of attention that has been given segments."""


def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, T, N, D], each row to those of its own segment, or without segments to all of its image.

    Args:
        module: the layer's attention.
        query: [B, N, T, D]; with segments B is 1.
        key: likewise.
        value: likewise.
        attention_mask: added to the scores, if any; None with segments.
        scaling: of the scores.
        dropout: 0.
        cu_seq_lens_q: first rows of all segments, and T.
    """
    assert not dropout, "a trial refuses what draws random numbers"
    if attention_mask is not None:
        assert cu_seq_lens_q is None, "segments are masked by themselves"
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return found.transpose(1, 2), None
    if cu_seq_lens_q is not None:
        setattr(module, _CALLED, True)
    count, _, rows, _ = query.shape
    segments = _in_graph(query, cu_seq_lens_q) if torch.compiler.is_compiling() else _segments(query, cu_seq_lens_q)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return attend(query, key, value, segments, scale=scaling).unflatten(0, (count, rows)), None


def _segments(query: Tensor, firsts: Tensor | None) -> Segments:
    """Return the segments of queries [B, N, T, D]: of their first rows and T, or without these of B images."""
    count, _, rows, _ = query.shape
    if firsts is None:
        return _images(count, rows, query.device)
    found: Segments | None = getattr(firsts, _SEGMENTS, None)
    if found is None:
        found = Segments.of(firsts.diff().tolist(), causal=False, rows=rows, device=query.device)
        setattr(firsts, _SEGMENTS, found)
    return found


def _in_graph(query: Tensor, firsts: Tensor | None) -> CarriedSegments:
    return CarriedSegments(_carried(query, firsts))


@torch.library.custom_op("mimo_transformers::image_segments", mutates_args=())
def _carried(query: Tensor, firsts: Tensor | None) -> Tensor:
    """Return what carries the segments of queries, see `_segments`."""
    return carry(_segments(query, firsts))


@_carried.register_fake
def _carried_fake(_query: Tensor, _firsts: Tensor | None) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


@lru_cache(maxsize=8)
def _images(count: int, rows: int, device: torch.device) -> Segments:
    return Segments.of((rows,) * count, causal=False, device=device)


def use_image_attention(config: Any) -> None:
    """Have the layers of a config's tower call `image_attention`."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMAGE_ATTENTION, image_attention)
    config._attn_implementation = IMAGE_ATTENTION  # noqa: SLF001 - the library's own way looks for a kernel


def makes_one_call(tower: nn.Module) -> bool:
    """Tell whether any layer of a tower that has run has been given segments."""
    return any(hasattr(part, _CALLED) for part in tower.modules())
