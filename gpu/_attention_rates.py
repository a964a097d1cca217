"""How long `attend` takes in bf16 beside the bare kernel that it calls, and beside padded calls of PyTorch's own.

Shapes: T rows of B segments, the longest S rows; N heads, D their width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import attrs
import torch
from _case import Case, Found, noting, run
from _rows import chat, images
from _turns_taken import Way, medians, ratio, take_turns
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from mimo.model.runtime import Segments, attend
from mimo.model.testing.varlen import varlen_attention

ROUNDS, TINY_ROUNDS = 15, 2
LONGER = 1.2
"""How many times as long as the bare kernel `attend` may take."""


@attrs.frozen(kw_only=True)
class Rows:
    """Segments that attend: their lengths, N, and D."""

    lengths: Sequence[int]
    causal: bool
    heads: int
    width: int


def cases(*, tiny: bool) -> Mapping[str, Rows]:
    """Return what is timed."""
    if tiny:
        return {"chat": Rows(lengths=chat(64, 4), causal=True, heads=2, width=16)}
    return {
        "23 chat samples in 8,192 rows": Rows(lengths=chat(8192, 23), causal=True, heads=16, width=128),
        "64 images of free size": Rows(lengths=images(64), causal=False, heads=16, width=64),
    }


def ways(rows: Rows, device: torch.device) -> Mapping[str, Way]:
    """Return what takes turns, each over the same rows."""
    shape = sum(rows.lengths), rows.heads, rows.width
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(query)
    segments = Segments.of(rows.lengths, causal=rows.causal, device=device)

    def way(forward: Callable[[Tensor, Tensor, Tensor], Tensor], *given: Tensor) -> Way:
        *leaves, upper = given

        def run_forward() -> Callable[[], object]:
            found = forward(*leaves)
            return lambda: torch.autograd.grad(found, leaves, upper)

        return run_forward

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, segments)

    padded = [_pad(x, rows.lengths) for x in (query, key, value, gradient)]
    return {
        "attend": way(ours, query, key, value, gradient),
        "varlen_attn": way(_bare(rows, device), query, key, value, gradient),
        "padded": way(_padded(rows, device), *padded),
    }


def _bare(rows: Rows, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    ends = torch.tensor([0, *accumulate(rows.lengths)], dtype=torch.int32, device=device)
    most = max(rows.lengths)
    kernel: Any = varlen_attn if device.type == "cuda" else varlen_attention
    sees = (-1, 0) if rows.causal else (-1, -1)
    scale = rows.width**-0.5

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = kernel(query, key, value, ends, ends, most, most, scale=scale, window_size=sees)
        return found

    return forward


def _padded(rows: Rows, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if rows.causal:  # no row sees what follows, padding least of all
        return partial(functional.scaled_dot_product_attention, is_causal=True)
    at = torch.arange(max(rows.lengths), device=device)
    mask = at < torch.tensor(rows.lengths, device=device).view(-1, 1, 1, 1)  # [B, 1, 1, S]
    return partial(functional.scaled_dot_product_attention, attn_mask=mask)


def _pad(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [B, N, S, D] of [T, N, D], as a leaf."""
    padded = torch.nn.utils.rnn.pad_sequence(list(x.detach().split(list(lengths))), batch_first=True)
    return padded.transpose(1, 2).contiguous().requires_grad_(x.requires_grad)


def test(case: Case) -> Found:
    """Time them."""
    figures: dict[str, Any] = {}
    if not case.is_cuda:
        figures["left out"] = "the kernel without padding, a loop stands in for it; no ratio is judged"
    wrong: list[str] = []
    for name, rows in cases(tiny=case.tiny).items():
        with noting(name, wrong):
            took = take_turns(case, ways(rows, case.device), rounds=TINY_ROUNDS if case.tiny else ROUNDS)
            figures[f"{name}, seconds"] = {way: medians(each) for way, each in took.items()}
            for other in ("varlen_attn", "padded"):
                shares = attrs.asdict(ratio(took["attend"], took[other]))
                figures[f"{name}, attend over {other}"] = shares
                if case.is_cuda and other == "varlen_attn":
                    wrong += [
                        f"{name}: {part} takes {share:.3g} times as long as the bare kernel, allowed {LONGER:g}"
                        for part, share in shares.items()
                        if not share <= LONGER
                    ]
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
