"""Exact attention within each segment of packed rows, in one kernel call or in those that cost least.

With several context ranks the keys and values of all are gathered before the calls, in one message a layer, and each
rank's rows attend to them (as in Llama 3, arXiv:2407.21783, section 3.3.2). Passing them on in a ring instead takes the
same time: a step with two ranks on CPUs takes gathered 0.96, 0.98 and 1.11 times the CPU seconds of a ring's at 256,
1,024 and 2,048 tokens a sample (`benchmarks/cp.py`), where the ring may join parts by kernels that PyTorch doesn't
promise, and asks for samples of one length without padding. Gathering takes any lengths and the public kernel; what it
costs is room for the keys and values of whole samples.
Shapes: T rows, N query heads, K key-value heads, D head width; G rows that are looked at; C segments of one row each,
which looks at L rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.attention.kernels import Kernel, kernel_of
from mimo.model.attention.padded import weigh
from mimo.model.attention.segments import Segments
from mimo.model.attention.varlen import VarlenCall


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
    """Return what `mimo.model.attention.attend` does for segments as they are; it describes the arguments."""
    assert query.shape[0] == segments.rows, f"{query.shape[0]} rows, segments of {segments.rows}"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key.dim() == query.dim() + 1:
        return _attend_single(query, key, value, segments, heads=heads, scale=scale, soft_cap=soft_cap, sinks=sinks)
    cut = segments.cut
    kernel = kernel_of(
        query.device,
        query.dtype,
        widths=(query.shape[-1], value.shape[-1]),
        scored=soft_cap is not None or sinks is not None,
        items=cut.has_items,
    )
    call = segments.varlen if kernel is Kernel.VARLEN else segments.padded
    key, value = _seen(key, value, segments, call.key_index)
    if heads is not None:
        key, value = key[:, heads], value[:, heads]
    if not cut.rows:
        # Without rows of its own a rank still takes part in the backward of all that its peers gathered.
        attended = value.new_zeros(0, query.shape[1], value.shape[2]) + (query[:0].sum() + key.sum() + value.sum())
    elif isinstance(call, VarlenCall):
        attended = call.attend(query[: cut.rows], key, value, causal=cut.causal, window=cut.window, scale=scale)
    else:
        attended = call.attend(
            query[: cut.rows], key, value, causal=cut.causal, scale=scale, soft_cap=soft_cap, sinks=sinks
        )
    padding = segments.rows - cut.rows
    return functional.pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended


def _attend_single(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    heads: Sequence[int] | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [C, N, D] of one query [N, D] of each segment to its keys, of [C, K, L, D]."""
    if heads is not None:
        key, value = key[:, heads], value[:, heads]
    # As rows, a group's heads read their keys once: [C, K, N / K, D].
    rows = query.unflatten(1, (key.shape[1], -1)) if sinks is None else query.unsqueeze(2)
    mask = segments.single_mask
    found = weigh(rows, key, value, mask=mask, causal=False, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return found.flatten(1, 2)


def _seen(key: Tensor, value: Tensor, segments: Segments, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values that an index names [G, K, D], those that other context ranks hold included."""
    if segments.context.size == 1:
        return _take(key, index, segments.held), _take(value, index, segments.held)
    heads, widths = key.shape[1], (key.shape[2], value.shape[2])
    held = torch.cat([functional.pad(x, (0, max(widths) - x.shape[2])) for x in (key, value)], 1)[: segments.cut.rows]
    gathered = segments.context.share(held, segments.counts)  # [all ranks' rows, 2 K, D]
    assert index is not None
    taken = gathered.index_select(0, index)
    return taken[:, :heads, : widths[0]], taken[:, heads:, : widths[1]]


def _take(x: Tensor, index: Tensor | None, rows: int) -> Tensor:
    return x[:rows].contiguous() if index is None else x.index_select(0, index)
