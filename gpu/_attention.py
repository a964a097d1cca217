"""Attention of packed rows by `attend`, in each kind of number, beside a plain loop over segments in float64.

Where other kernels compute the same form, what `attend` takes is also compared with each of them.

Shapes: T rows, N query heads, K key-value heads, D and V their widths; S rows of a segment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import attrs
import torch
from _case import Case, Found, noting, run
from _rows import chat, shares_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mimo.model.attention.kernels import Kernel, kernel_of
from mimo.model.runtime import Segments, attend

ROWS, SAMPLES, TINY_ROWS, TINY_SAMPLES, PADDING = 4096, 23, 96, 5, 7
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@attrs.frozen(kw_only=True)
class Form:
    """One form of attention.

    Args:
        causal: whether a row sees only itself and earlier rows.
        window: of these, how many it sees at most; 0 for all.
        heads: N, K.
        widths: D, V.
        items: whether some rows in the middle of each segment see each other.
        soft_cap: of scores; None for none.
        sinks: whether heads have them.
    """

    causal: bool = True
    window: int = 0
    heads: tuple[int, int] = (4, 4)
    widths: tuple[int, int] = (64, 64)
    items: bool = False
    soft_cap: float | None = None
    sinks: bool = False


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "causal": Form(),
        "window": Form(window=20),
        "full": Form(causal=False),
        "grouped heads": Form(heads=(8, 2)),
        "grouped heads, full": Form(heads=(8, 2), causal=False),
        "wider keys": Form(widths=(96, 64)),
        "wider values, grouped": Form(widths=(64, 128), heads=(4, 2)),
        "widths of no multiple of eight": Form(widths=(20, 36)),
        "wide heads": Form(widths=(272, 272), heads=(2, 2)),
        "items": Form(items=True),
        "items in a window": Form(items=True, window=20, heads=(4, 2)),
        "sinks": Form(sinks=True, heads=(4, 2)),
        "soft cap": Form(soft_cap=1.5),
        "soft cap and sinks in a window": Form(soft_cap=1.5, sinks=True, window=20),
    }
)


@attrs.frozen(kw_only=True, eq=False)
class Given:
    """What rows attend with: query [T, N, D], key [T, K, D], value [T, K, V], sinks [N], and the output's gradient."""

    tensors: Mapping[str, Tensor]
    gradient: Tensor

    @classmethod
    def of(cls, form: Form, rows: int, device: torch.device) -> Given:
        """Draw them; the CPU draws, so that every device gets the same."""
        draw = torch.Generator().manual_seed(3)
        (many, few), (width, wide) = form.heads, form.widths
        shapes = {"query": (rows, many, width), "key": (rows, few, width), "value": (rows, few, wide)}
        if form.sinks:
            shapes["sinks"] = (1, many, 1)
        drawn = {name: torch.randn(shape, generator=draw).to(device) for name, shape in shapes.items()}
        return cls(tensors=drawn, gradient=torch.randn(rows, many, wide, generator=draw).to(device))

    def to(self, dtype: torch.dtype) -> Given:
        """Return them rounded, as leaves of a graph."""
        tensors = {name: value.to(dtype).detach().requires_grad_() for name, value in self.tensors.items()}
        return Given(tensors=tensors, gradient=self.gradient.to(dtype))

    def backward(self, found: Tensor) -> Mapping[str, Tensor]:
        """Return the gradients by name."""
        gradients = torch.autograd.grad(found, list(self.tensors.values()), self.gradient)
        return dict(zip(self.tensors, gradients, strict=True))


def spans_of(length: int) -> Sequence[tuple[int, int]]:
    """Return the rows of a segment's two items."""
    return [(length // 4, length // 2), (length // 2, length // 2 + length // 8)]


def plain(form: Form, given: Given, lengths: Sequence[int]) -> Tensor:
    """Return attention [T, N, V], segment by segment; rows behind the last one get zeros."""
    tensors, used = given.tensors, sum(lengths)
    groups = form.heads[0] // form.heads[1]
    key, value = (tensors[name].repeat_interleave(groups, 1) for name in ("key", "value"))
    pieces = (x[:used].split(list(lengths)) for x in (tensors["query"], key, value))
    found = []
    for q, k, v in zip(*pieces, strict=True):
        scores = torch.einsum("qnd,knd->nqk", q, k) * form.widths[0] ** -0.5
        if form.soft_cap is not None:
            scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
        at = torch.arange(len(q), device=q.device)
        back = at.unsqueeze(1) - at
        seen = back >= 0 if form.causal else torch.ones_like(back, dtype=torch.bool)
        for low, high in spans_of(len(q)) if form.items else ():
            seen[low:high, low:high] = True
        if form.window:
            seen &= back < form.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if form.sinks:
            scores = torch.cat([scores, tensors["sinks"].view(-1, 1, 1).expand(-1, len(q), 1)], 2)
        found.append(torch.einsum("nqk,knv->qnv", scores.softmax(2)[..., : len(q)], v))
    attended = torch.cat(found)
    return torch.cat([attended, attended.new_zeros(len(tensors["query"]) - used, *attended.shape[1:])])


def attended(case: Case, form: Form, given: Given, lengths: Sequence[int]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return attention [T, N, V] as `attend` computes it just now, and the gradients by name."""
    segments = Segments.of(
        lengths,
        causal=form.causal,
        window=form.window,
        rows=len(given.tensors["query"]),
        device=case.device,
        items=[spans_of(length) for length in lengths] if form.items else (),
    )
    query, key, value = (given.tensors[name] for name in ("query", "key", "value"))
    sinks = given.tensors["sinks"].flatten() if form.sinks else None
    found = attend(query, key, value, segments, soft_cap=form.soft_cap, sinks=sinks)
    return found, given.backward(found)


@contextmanager
def padded(*, by_products: bool) -> Iterator[None]:
    """Have `attend` pad, and each padded call computed by the kernel that PyTorch takes, or by products one by one."""
    with (
        patch("mimo.model.attention.attention.kernel_of", lambda *_args, **_keys: Kernel.FUSED),
        sdpa_kernel([SDPBackend.MATH]) if by_products else nullcontext(),
    ):
        yield


def beside_others(case: Case, form: Form, dtype: torch.dtype, lengths: Sequence[int]) -> dict[str, float]:
    """Return shares of what two kernels may differ by, twice of what each may be off, by the other's name."""
    kernel = takes(case, form, dtype)
    if kernel in (Kernel.STEPWISE, Kernel.MATH):  # products one by one, as is what there would be beside them
        return {}
    given = Given.of(form, sum(lengths) + PADDING, case.device).to(dtype)
    value, gradients = attended(case, form, given, lengths)
    found = {}
    for name, by_products in (("padded", False), ("padded, by products", True)):
        if by_products or kernel is not Kernel.FUSED:
            with padded(by_products=by_products):
                other, others = attended(case, form, given, lengths)
            both = {part: (gradients[part], others[part]) for part in gradients}
            found[name] = max(shares_of(dtype, (value, other.detach()), both).values()) / 2
    return found


def compare(case: Case, form: Form, dtype: torch.dtype, lengths: Sequence[int]) -> dict[str, float]:
    """Return shares of what may be off: of the rows that were attended, and of each gradient."""
    given = Given.of(form, sum(lengths) + PADDING, case.device).to(dtype)
    found, gradients = attended(case, form, given, lengths)
    exact = given.to(torch.float64)
    truth = plain(form, exact, lengths)
    wanted = exact.backward(truth)
    by_head = {name: (gradients[name], wanted[name]) for name in gradients if name != "sinks"}
    if form.sinks:  # one number a head: as one row
        by_head["sinks"] = gradients["sinks"].view(1, -1), wanted["sinks"].view(1, -1)
    return shares_of(dtype, (found, truth), by_head)


def takes(case: Case, form: Form, dtype: torch.dtype) -> Kernel:
    """Return which kernel `attend` takes."""
    scored = form.sinks or form.soft_cap is not None
    return kernel_of(case.device, dtype, widths=form.widths, scored=scored, items=form.items)


def test(case: Case) -> Found:
    """Compare all forms in all kinds of numbers."""
    lengths = chat(TINY_ROWS, TINY_SAMPLES) if case.tiny else chat(ROWS, SAMPLES)
    figures: dict[str, Any] = {"rows of segments": lengths, "at most": 1}
    wrong: list[str] = []
    for dtype in DTYPES:
        name_of_dtype = str(dtype).removeprefix("torch.")
        for name, form in FORMS.items():
            what = f"{name_of_dtype}, {takes(case, form, dtype).name.lower()}: {name}"
            with noting(what, wrong):
                shares = compare(case, form, dtype, lengths)
                figures[what] = shares
                others = beside_others(case, form, dtype, lengths)
                figures |= {f"{what}, beside {other}": share for other, share in others.items()}
                wrong += [
                    f"{what}: differs from {other} by {share:g} times what is allowed"
                    for other, share in others.items()
                    if not share <= 1
                ]
                wrong += [
                    f"{what}: {part} is off by {share:g} times what is allowed"
                    for part, share in shares.items()
                    if not share <= 1
                ]
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
