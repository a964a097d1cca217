"""Attention of all chunks in one kernel call without padding, where a GPU has the kernel (`torch.nn.attention.varlen`).

It is FlashAttention-2's (Dao 2023, arXiv:2307.08691), in bf16 and fp16. A chunk is a sequence of it, whose last query
sees its last key.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from mimo.model.attention.call_rows import chunk_keys
from mimo.model.attention.chunks import Cut
from mimo.topology.device_copies import to_device

WIDEST = 256
"""Head width that the kernel takes at most."""
_ALIGNED = 8  # it takes multiples of it
_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later


@attrs.frozen(eq=False)
class VarlenCall:
    """A rank's rows as the kernel takes them.

    Args:
        queries: [C + 1] where the rows of each of C chunks begin, and the last one ends.
        keys: [C + 1] the same of the rows that they look at.
        most: of a chunk, the most queries and the most keys.
        key_index: row that each key is; None for the packed order.
    """

    queries: Tensor
    keys: Tensor
    most: tuple[int, int]
    key_index: Tensor | None

    @classmethod
    def of(cls, cut: Cut, *, gathered: Tensor | None, device: torch.device) -> VarlenCall:
        """Return the call; for the arguments see `PaddedCalls.of`."""
        rows = [chunk.rows for chunk in cut.chunks]
        index = None if gathered is None else to_device(chunk_keys(gathered, cut), device)
        return cls(
            _ends(rows, device), _ends(cut.keys, device), (max(rows, default=0), max(cut.keys, default=0)), index
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window: int, scale: float) -> Tensor:
        """Return attention [T, N, V] of rows [T, N, D] to keys [G, K, D] and values [G, K, V], K a divisor of N."""
        width = value.shape[2]
        widest = max(query.shape[2], width)
        widest += -widest % _ALIGNED
        query, key, value = (functional.pad(x, (0, widest - x.shape[2])) for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not _KNOWS_GROUPS:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        sees = (window - 1 if 0 < window < self.most[1] else -1, 0) if causal else (-1, -1)
        attention = partial(varlen_attn, enable_gqa=groups > 1) if _KNOWS_GROUPS else varlen_attn
        found = attention(query, key, value, self.queries, self.keys, *self.most, scale=scale, window_size=sees)
        assert isinstance(found, Tensor)
        return found[..., :width]


def takes_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a device has the kernel for numbers of a kind."""
    return device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)
