"""Ring attention over two context ranks, the usual other way, to be measured beside the gathering one.

Keys and values travel from rank to rank while each computes with what it has, and partial results are joined by their
logarithms of sums (Liu et al. 2023, arXiv:2310.01889); with early and late chunks on each rank, every step is half a
square without a mask. Written to its advantage: samples of one length, no padding, received rows kept for backward.
Shapes: C samples, each h rows of its early and h of its late chunk here; N query heads, K key-value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.runtime import ContextAxis, Segments

_FORTH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the only kernel that returns its sums
_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - likewise


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, both: Tensor, context: ContextAxis) -> Tensor:
        """Take queries [C, 2 h, N, D] and keys beside values [C, 2 h, 2 K, D]."""
        other = torch.empty_like(both)
        works = _swap(both, other, context)
        q, groups = query.transpose(1, 2), query.shape[2] * 2 // both.shape[2]
        half = q.shape[2] // 2
        out, sums = _FORTH(q, *_heads(both, groups), is_causal=True)
        _finish(works)
        # Rank 0 holds the first and last chunk, rank 1 the middle: rank 0's last rows see all that rank 1 has, and all
        # of rank 1's rows see rank 0's first.
        mine = slice(half, None) if context.rank == 0 else slice(None)
        theirs = slice(None) if context.rank == 0 else slice(0, half)
        more, more_sums = _FORTH(q[:, :, mine], *_heads(other[:, theirs], groups))
        joined = torch.logaddexp(sums[:, :, mine], more_sums)
        part = out[:, :, mine] * (sums[:, :, mine] - joined).exp().unsqueeze(3)
        out[:, :, mine] = part + more * (more_sums - joined).exp().unsqueeze(3)
        sums[:, :, mine] = joined
        ctx.save_for_backward(query, both, other, out, sums)
        ctx.context, ctx.mine, ctx.theirs, ctx.groups = context, mine, theirs, groups
        return cast("Tensor", out.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        query, both, other, out, sums = ctx.saved_tensors
        mine, theirs, groups = ctx.mine, ctx.theirs, ctx.groups
        q, gradient = query.transpose(1, 2), gradients[0].transpose(1, 2)
        more, *pair = _BACK(
            gradient[:, :, mine],
            q[:, :, mine],
            *_heads(other[:, theirs], groups),
            out[:, :, mine],
            sums[:, :, mine],
            0.0,
            False,
        )
        half = q.shape[2] // 2
        sent = _joined(pair, groups)
        received = both.new_empty(both.shape[0], half if ctx.context.rank == 0 else 2 * half, *both.shape[2:])
        works = _swap(sent, received, ctx.context)
        found, *pair = _BACK(gradient, q, *_heads(both, groups), out, sums, 0.0, True)
        found[:, :, mine] += more
        whole = _joined(pair, groups)
        _finish(works)
        whole[:, : received.shape[1]] += received
        return found.transpose(1, 2), whole, None


def _heads(both: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [C, N, rows, D], one for each query head, which this kernel needs."""
    key, value = both.transpose(1, 2).repeat_interleave(groups, 1).chunk(2, 1)
    return key, value


def _joined(pair: Sequence[Tensor], groups: int) -> Tensor:
    """Return the gradients of keys beside values [C, rows, 2 K, D] from those of all query heads."""
    return torch.cat([x.unflatten(1, (-1, groups)).sum(2) for x in pair], 1).transpose(1, 2).contiguous()


def _swap(sent: Tensor, received: Tensor, context: ContextAxis) -> list[dist.Work | None]:
    peer = 1 - context.rank
    return [
        dist.irecv(received, group=context.group, group_src=peer),
        dist.isend(sent, group=context.group, group_dst=peer),
    ]


def _finish(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def ring_attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, heads: None = None) -> Tensor:
    """Do as `mimo.model.runtime.attend`, for two context ranks and samples of one length, a multiple of four."""
    assert heads is None
    assert segments.context.size == 2
    count = len(segments.cut.lengths)
    both = torch.cat((key, value), 1).unflatten(0, (count, -1)).contiguous()
    out = _Ring.apply(query.unflatten(0, (count, -1)), both, segments.context)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cast("Tensor", out).flatten(0, 1)
