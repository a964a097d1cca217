"""What `torch.nn.attention.varlen.varlen_attn` computes, for devices that lack its kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention [T, N, D], one sequence after the other; what the kernel would refuse fails.

    Args:
        query: [T, N, D].
        key: [G, N, D]; with ``enable_gqa`` of fewer heads.
        value: likewise.
        cu_seq_q: [C + 1], int32, where the queries of C sequences begin, and the last one ends.
        cu_seq_k: likewise of keys.
        max_q: the most queries of a sequence.
        max_k: the most keys of a sequence.
        scale: of the scores.
        window_size: how many keys a query sees before and behind the one that stands as far from the end; -1 for all.
        enable_gqa: whether a head of keys may serve several heads of queries.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(query) == cu_seq_q[-1], "rows that are no sequence's stay undefined"
    assert len(key) == len(value) == cu_seq_k[-1]
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    before, behind = (size if size >= 0 else len(key) for size in window_size)
    asked, seen = (ends.diff().tolist() for ends in (cu_seq_q, cu_seq_k))
    assert (max(asked), max(seen)) == (max_q, max_k)
    found = []
    for rows in zip(query.split(asked), key.split(seen), value.split(seen), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in rows)
        offset = torch.arange(k.shape[2]) - (torch.arange(q.shape[2]).unsqueeze(1) + k.shape[2] - q.shape[2])
        mask = ((offset >= -before) & (offset <= behind)).to(query.device)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)
