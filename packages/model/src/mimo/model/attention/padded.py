"""Attention in calls of `scaled_dot_product_attention`, or step by step: chunks of about one length share a call.

Shapes: in one call C chunks of Q queries, which look at L keys each; N query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from mimo.model.attention.batches import CALL_COSTS, batch
from mimo.model.attention.call_rows import keys_of, queries_of
from mimo.model.attention.calls import Call, call_of
from mimo.model.attention.chunks import Cut
from mimo.topology.device_copies import to_device

_ALIGNED = 8  # the kernels of GPUs take head widths that are multiples of it


@attrs.frozen(eq=False)
class PaddedCalls:
    """Which calls a rank's rows attend in, and where the rows of these are.

    Args:
        calls: for each kernel call its shape.
        query_index: [sum of C·Q] packed row that each query of the calls is; None when the order is the packed one.
        key_index: [sum of C·L] row that each key of the calls is; None likewise.
        inverse_index: row of the calls that holds each packed row; None likewise.
    """

    calls: tuple[Call, ...]
    query_index: Tensor | None
    key_index: Tensor | None
    inverse_index: Tensor | None

    @classmethod
    def of(cls, cut: Cut, *, gathered: Tensor | None, device: torch.device) -> PaddedCalls:
        """Return the calls that cost least.

        Args:
            cut: the rank's rows.
            gathered: where each row of the segments is among those that are looked at; None where this rank holds whole
                segments, which look at themselves.
            device: where they will run.
        """
        cost = CALL_COSTS["cpu" if device.type == "cpu" else "cuda"]
        batches = batch(cut.chunks, cut.keys, causal=cut.causal, cost=cost, window=cut.window)
        calls = tuple(
            call_of(
                [cut.chunks[i] for i in each],
                [cut.keys[i] for i in each],
                causal=cut.causal,
                window=cut.window,
                device=device,
                items=cut.items,
            )
            for each in batches
        )
        if gathered is None and len(calls) <= 1 and sum(call.chunks * call.queries for call in calls) == cut.rows:
            return cls(calls, None, None, None)
        queries, inverse = queries_of(cut.chunks, batches, calls)
        keys = queries
        if gathered is not None:
            keys = keys_of(gathered, cut.chunks, batches, calls, keys=cut.keys, lengths=cut.lengths)
        queries, keys, inverse = (to_device(index, device) for index in (queries, keys, inverse))
        return cls(calls, queries, keys, inverse)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return attention [T, N, D] of rows to the keys and values of all calls, in the order of these."""
        if self.query_index is not None:
            query = query.index_select(0, self.query_index)
        asked = query.split([call.chunks * call.queries for call in self.calls])
        sizes = [call.chunks * call.keys for call in self.calls]
        found = []
        for call, *rows in zip(self.calls, asked, key.split(sizes), value.split(sizes), strict=True):
            q, k, v = (x.unflatten(0, (call.chunks, -1)).transpose(1, 2) for x in rows)  # [C, N or K, Q or L, D]
            outs = [
                weigh(
                    q[:, :, piece.queries],
                    k[:, :, piece.keys],
                    v[:, :, piece.keys],
                    mask=piece.mask,
                    causal=causal,
                    scale=scale,
                    soft_cap=soft_cap,
                    sinks=sinks,
                )
                for piece in call.pieces
            ]
            out = torch.cat(outs, 2) if len(outs) > 1 else outs[0]
            found.append(out.transpose(1, 2).flatten(0, 1))
        attended = torch.cat(found)
        return attended if self.inverse_index is None else attended.index_select(0, self.inverse_index)


def weigh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [C, N, Q, V] of queries [C, N, Q, D] to keys [C, K, L, D], whose number of heads divides N."""
    if soft_cap is not None or sinks is not None:
        return _weigh_stepwise(query, key, value, mask=mask, causal=causal, scale=scale, soft_cap=soft_cap, sinks=sinks)
    attention = partial(
        functional.scaled_dot_product_attention, attn_mask=mask, is_causal=causal and mask is None, scale=scale
    )
    if not needs_alignment(query):
        return attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1])
    # Of GPUs, the kernel that takes fp32 and masks knows no groups of heads; where none fits, the one that writes down
    # all scores would be taken without a word.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    aligned = (functional.pad(x, (0, -x.shape[-1] % _ALIGNED)) for x in (query, key, value))
    with sdpa_kernel(chosen) if (chosen := _kernels()) else nullcontext():
        return attention(*aligned)[..., : value.shape[-1]]


def _kernels() -> list[SDPBackend]:
    """Return the kernels that may run on a GPU: not the one that writes down all scores, unless no other is enabled."""
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    return [kernel for kernel, is_enabled in enabled.items() if is_enabled]


def needs_alignment(query: Tensor) -> bool:
    """Tell whether kernels there take some head widths and as many heads of keys as of queries only, as GPUs' do."""
    return query.device.type == "cuda"


def _weigh_stepwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [C, N, Q, V] step by step, with what no kernel of PyTorch computes; scores are in fp32."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [C, K, N / K, Q, D]
    scores = (grouped @ key.unsqueeze(2).transpose(3, 4)).flatten(1, 2)  # [C, N, Q, L]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
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
