"""Exact attention within each segment of packed rows, in as few kernel calls as the lengths allow.

With several context ranks the keys and values of all are gathered before the calls, in one message a layer, and each
rank's rows attend to them (as in Llama 3, arXiv:2407.21783, section 3.3.2). Passing them on in a ring instead takes the
same time: a step with two ranks on CPUs takes gathered 0.96, 0.98 and 1.11 times the CPU seconds of a ring's at 256,
1,024 and 2,048 tokens a sample (`benchmarks/cp.py`), where the ring may join parts by kernels that PyTorch doesn't
promise, and asks for samples of one length without padding. Gathering takes any lengths and the public kernel; what it
costs is room for the keys and values of whole samples.
Shapes: T rows, N query heads, K key-value heads, D head width, G rows of all context ranks without padding; in one
call C chunks of segments, Q rows of each, which look at L rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from mimo.model.attention.segments import Segments


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    heads: Sequence[int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return scaled dot-product attention [T, N, D] of each row to its own segment; padding at the end gets zeros.

    With several context ranks every one of them must call it, those without rows too.

    Args:
        query: [T, N, D].
        key: [T, K, D], or of all `Segments.held` rows; of `Segments.single_rows` [C, K, L, D]. K divides N, and each
            key-value head serves N / K query heads in a row (Ainslie et al. 2023, arXiv:2305.13245).
        value: like ``key``, of any width.
        segments: of these T rows.
        heads: [N] the key-value head of each query head, where they are not served in equal rows.
        scale: of the scores, 1 / sqrt(D) if None.
        soft_cap: bounds the scores s as ``soft_cap * tanh(s / soft_cap)`` (Gemma Team 2024, arXiv:2408.00118).
        sinks: [N] a score of each head that takes part in its softmax and adds nothing (OpenAI 2025,
            arXiv:2508.10925).
    """
    assert query.shape[0] == segments.rows, f"{query.shape[0]} rows, segments of {segments.rows}"
    if key.dim() == query.dim() + 1:
        return _attend_single(query, key, value, segments, heads=heads, scale=scale, soft_cap=soft_cap, sinks=sinks)
    key, value = _seen(key, value, segments)
    if heads is not None:
        key, value = key[:, heads], value[:, heads]
    grouped = key.shape[1] != query.shape[1]
    asked = _take(query, segments.query_index, segments.used).split(
        [call.chunks * call.queries for call in segments.calls]
    )
    seen = [call.chunks * call.keys for call in segments.calls]
    found = []
    for call, *rows in zip(segments.calls, asked, key.split(seen), value.split(seen), strict=True):
        q, k, v = (x.unflatten(0, (call.chunks, -1)).transpose(1, 2) for x in rows)  # [C, N or K, Q or L, D]
        if soft_cap is not None or sinks is not None:
            weigh = partial(_weigh, causal=segments.causal, scale=scale, soft_cap=soft_cap, sinks=sinks)
            outs = [
                weigh(q[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys], mask=piece.mask)
                for piece in call.pieces
            ]
        else:
            outs = [
                functional.scaled_dot_product_attention(
                    q[:, :, piece.queries],
                    k[:, :, piece.keys],
                    v[:, :, piece.keys],
                    attn_mask=piece.mask,
                    is_causal=segments.causal and piece.mask is None,
                    enable_gqa=grouped,
                    scale=scale,
                )
                for piece in call.pieces
            ]
        out = torch.cat(outs, 2) if len(outs) > 1 else outs[0]
        found.append(out.transpose(1, 2).flatten(0, 1))
    # Without rows of its own a rank still takes part in the backward of all that its peers gathered.
    none = value.new_zeros(0, query.shape[1], value.shape[2])
    attended = torch.cat(found) if found else none + (query[:0].sum() + key.sum() + value.sum())
    if segments.inverse_index is not None:
        attended = attended.index_select(0, segments.inverse_index)
    padding = segments.rows - segments.used
    return functional.pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended


def _weigh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [C, N, Q, V] step by step, with what no kernel of PyTorch computes; scores are in fp32."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [C, K, N / K, Q, D]
    scores = (grouped @ key.unsqueeze(2).transpose(3, 4)).flatten(1, 2)  # [C, N, Q, L]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = mask
    if seen is None or isinstance(seen, CausalBias):
        queries, keys = scores.shape[2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        seen = seen.tril(keys - queries) if causal else seen
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat((scores, beside), 3)
    shares = scores.softmax(3)[..., : key.shape[2]].to(value.dtype)
    attended: Tensor = (shares.unflatten(1, (value.shape[1], -1)) @ value.unsqueeze(2)).flatten(1, 2)
    return attended


def _attend_single(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    heads: Sequence[int] | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [C, N, D] of one query [N, D] of each segment to its keys, of [C, K, L, D]."""
    if heads is not None:
        key, value = key[:, heads], value[:, heads]
    mask = segments.calls[0].pieces[0].mask
    if soft_cap is not None or sinks is not None:
        rows = query.unsqueeze(2)  # [C, N, 1, D]
        found = _weigh(rows, key, value, mask=mask, causal=False, scale=scale, soft_cap=soft_cap, sinks=sinks)
    else:  # a group's heads, as rows, read their keys once
        rows = query.unflatten(1, (key.shape[1], -1))  # [C, K, N / K, D]
        found = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return found.flatten(1, 2)


def _seen(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all calls [sum of C·L, K, D], those that other context ranks hold included."""
    if segments.context.size == 1:
        return _take(key, segments.key_index, segments.held), _take(value, segments.key_index, segments.held)
    heads, widths = key.shape[1], (key.shape[2], value.shape[2])
    held = torch.cat([functional.pad(x, (0, max(widths) - x.shape[2])) for x in (key, value)], 1)[: segments.used]
    gathered = segments.context.share(held, segments.counts)  # [G, 2 K, D]
    assert segments.key_index is not None
    taken = gathered.index_select(0, segments.key_index)
    return taken[:, :heads, : widths[0]], taken[:, heads:, : widths[1]]


def _take(x: Tensor, index: Tensor | None, rows: int) -> Tensor:
    return x[:rows].contiguous() if index is None else x.index_select(0, index)
