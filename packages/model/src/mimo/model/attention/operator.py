"""Attention as one node of a compiled layer's graph: how many kernel calls it takes depends on the batch.

A graph takes tensors, and is made once for batches of any lengths. So the segments of a batch travel in a tensor that
carries them, and the forward returns another that carries what autograd has recorded inside, for the backward to find.
Shapes: T rows, N query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from mimo.model.attention import attention
from mimo.model.attention.segments import CarriedSegments, Segments
from mimo.model.graphs import carry, content_of


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments | CarriedSegments,
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
        segments: of these T rows; those that are carried make all of it one node of a graph.
        heads: [N] the key-value head of each query head, where they are not served in equal rows.
        scale: of the scores, 1 / sqrt(D) if None.
        soft_cap: bounds the scores s as ``soft_cap * tanh(s / soft_cap)`` (Gemma Team 2024, arXiv:2408.00118).
        sinks: [N] a score of each head that takes part in its softmax and adds nothing (OpenAI 2025,
            arXiv:2508.10925).
    """
    if isinstance(segments, Segments):
        return attention.attend(query, key, value, segments, heads=heads, scale=scale, soft_cap=soft_cap, sinks=sinks)
    inputs = [x for x in (query, key, value, sinks) if x is not None]
    records = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    found, _ = _attend(inputs, segments.carrier, heads, scale, soft_cap, records)
    return cast("Tensor", found)


@contextmanager
def _recording() -> Iterator[None]:
    """Have autograd record inside of an operator, from which the dispatcher leaves it out."""
    left_out = torch._C._dispatch_tls_local_exclude_set()  # noqa: SLF001 - no other way in
    for name in ("AutogradFunctionality", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, name))  # noqa: SLF001
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():  # noqa: SLF001
        yield


@torch.library.custom_op("mimo::attend", mutates_args=())
def _attend(
    inputs: Sequence[Tensor],
    segments: Tensor,
    heads: Sequence[int] | None,
    scale: float | None,
    soft_cap: float | None,
    records: bool,  # noqa: FBT001 - operators are called by position
) -> tuple[Tensor, Tensor]:
    """Return what `attend` does, and what carries the recorded graph of it.

    Args:
        inputs: query, key and value, and sinks, if there are some.
        segments: carries them.
        heads: as there.
        scale: as there.
        soft_cap: as there.
        records: whether there will be a backward.
    """

    def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attention.attend(
            query, key, value, content_of(segments), heads=heads, scale=scale, soft_cap=soft_cap, sinks=sinks
        )

    if not records:
        return run(*inputs).contiguous(), carry(None)
    with _recording():
        leaves = [x.detach().requires_grad_() for x in inputs]
        found = run(*leaves).contiguous()
    return found.detach(), carry((found, leaves))


@_attend.register_fake
def _attend_fake(inputs: Sequence[Tensor], *_rest: object) -> tuple[Tensor, Tensor]:
    query, _, value = inputs[:3]
    return value.new_empty(*query.shape[:2], value.shape[2]), torch.empty(1, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("mimo::attend_backward", mutates_args=())
def _attend_backward(recorded: Tensor, gradient: Tensor, _inputs: Sequence[Tensor], _found: Tensor) -> list[Tensor]:
    """Return the gradients of the inputs.

    Inputs and result are read in the recorded graph only, which a compiler can't know: by being given here, they are
    saved by its graph too, and nothing is written where they lie.
    """
    result, leaves = content_of(recorded)
    with _recording():
        return [x.contiguous() for x in torch.autograd.grad(result, leaves, gradient)]


@_attend_backward.register_fake
def _attend_backward_fake(
    _recorded: Tensor, _gradient: Tensor, inputs: Sequence[Tensor], _found: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[0])


def _differentiate(ctx: Any, gradient: Tensor, _of_recorded: None) -> tuple[Any, ...]:
    found, recorded, *inputs = ctx.saved_tensors
    return _attend_backward(recorded, gradient, inputs, found), None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
