"""The divergence from a teacher, of its likeliest ids and the rest, against the same written out over whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from mimo.model.layers import Linear
from mimo.model.losses import CrossEntropy, Divergence, Head, RowLoss, TopIds, chunked_losses, row_losses
from mimo.model.runtime import TensorAxis

ROWS = 6
SINGLE = TensorAxis.single()


def _buckets(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the probabilities [T, k + 1] of ids and of all others together."""
    found = (logits / temperature).softmax(1).gather(1, ids.long())
    return torch.cat([found, (1 - found.sum(1, keepdim=True)).clamp_min(0)], dim=1)


def _written_out(student: Tensor, teacher: Tensor, count: int, temperature: float) -> Tensor:
    """Return the divergence [T] in fp64, by autograd's own rules."""
    ids = teacher.double().topk(count, dim=1).indices
    wanted, found = (_buckets(logits.double(), ids, temperature) for logits in (teacher, student))
    if count == student.shape[1]:
        wanted, found = wanted[:, :-1], found[:, :-1]
    return temperature**2 * functional.kl_div(found.log(), wanted, reduction="none").sum(1)


def _check(_rank: int, vocabulary: int) -> None:
    world = dist.get_world_size()
    axis = TensorAxis.of(DeviceMesh("cpu", range(world), mesh_dim_names=("tp",)))
    span = axis.span(vocabulary)
    columns = slice(span.start, span.stop)
    torch.manual_seed(vocabulary)
    for temperature, count in ((1.0, 1), (2.5, 3), (0.5, vocabulary - 1), (2.0, vocabulary)):
        teacher = torch.randn(ROWS, vocabulary) * 2
        whole = (torch.randn(ROWS, vocabulary) * 2).requires_grad_()
        labels, (of_labels, of_rows) = torch.arange(ROWS) % vocabulary, torch.randn(2, ROWS)
        wanted = _written_out(whole, teacher, count, temperature)
        entropies = functional.cross_entropy(whole, labels, reduction="none")
        (wished,) = torch.autograd.grad((wanted * of_rows).sum() + (entropies * of_labels).sum(), whole)
        found = TopIds.of(teacher[:, columns], count, temperature=temperature, vocabulary=vocabulary, axis=axis)
        assert torch.equal(found.ids.long(), teacher.topk(count, dim=1).indices)
        own = (teacher / temperature).log_softmax(1).topk(count, dim=1).values
        torch.testing.assert_close(found.log_probabilities, own, rtol=1e-6, atol=1e-6)
        losses: list[RowLoss] = [
            Divergence(teacher=found, vocabulary=vocabulary, axis=axis),
            CrossEntropy(labels=labels, vocabulary=vocabulary, axis=axis),
        ]
        for overwrites in (False, True):
            mine = whole.detach()[:, columns].clone().requires_grad_()
            divergence, entropy = row_losses(mine.clone(), losses, overwrites=overwrites)
            ((divergence * of_rows).sum() + (entropy * of_labels).sum()).backward()
            torch.testing.assert_close(divergence.double(), wanted, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(mine.grad, wished[:, columns], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("world", "vocabulary"), [(1, 7), (2, 7), (3, 11), (4, 5)])
def test_divergence_over_a_split_vocabulary(run_ranks: Callable[..., list[Any]], world: int, vocabulary: int) -> None:
    """Losses and gradients, beside those of labels, at any temperature, up to all ids; uneven and empty spans too."""
    run_ranks(world, _check, vocabulary)


@pytest.mark.parametrize("rows", [1, 4, 0])
@pytest.mark.parametrize("only", [None, 0, 1])
def test_rows_a_few_at_a_time(rows: int, only: int | None) -> None:
    """Logits that are made once more give the same, whichever of the losses is trained on."""
    torch.manual_seed(1)
    head, hidden = Linear(5, 9, bias=False), torch.randn(ROWS, 5, requires_grad=True)
    labels, teacher = torch.arange(ROWS), torch.randn(ROWS, 9)
    targets = TopIds.of(teacher, 3, temperature=2.0, vocabulary=9, axis=SINGLE)
    found = chunked_losses(
        hidden,
        Head(logits=lambda some, _first: head(some), parameters=[head.weight], layers=[head]),
        [
            CrossEntropy(labels=labels, vocabulary=9, axis=SINGLE),
            Divergence(teacher=targets, vocabulary=9, axis=SINGLE),
        ],
        rows=rows,
    )
    again = hidden.detach().requires_grad_()
    logits = again @ (weight := head.weight.detach().requires_grad_()).t()
    wanted = functional.cross_entropy(logits, labels, reduction="none"), _written_out(logits, teacher, 3, 2.0)
    chosen = range(2) if only is None else [only]
    for both in (found, wanted):
        torch.stack([both[index].sum().double() * (index + 1) for index in chosen]).sum().backward()
    torch.testing.assert_close(hidden.grad, again.grad, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(head.weight.grad, weight.grad, rtol=2e-5, atol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


def test_what_lies_far_apart_stays_finite() -> None:
    """Sure teachers and students that disagree: no probability that rounds to 0 becomes an infinite loss."""
    teacher = torch.tensor([[1e4, 0.0, 0.0, -1e4], [0.0, 0.0, 0.0, 0.0]])
    student = torch.tensor([[-1e4, 1e4, 0.0, 0.0], [2e4, 0.0, 0.0, 1.0]]).requires_grad_()
    targets = TopIds.of(teacher, 2, temperature=1.0, vocabulary=4, axis=SINGLE)
    (found,) = row_losses(student, [Divergence(teacher=targets, vocabulary=4, axis=SINGLE)])
    certain = math.log(1 + math.e) / 2 + math.log(2)  # what the student's rest is, and the teacher's own entropy
    assert found.tolist() == pytest.approx([2e4, 0.75 * 2e4 - certain - math.log(2) / 2], rel=1e-6)
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_a_student_that_agrees_has_no_loss() -> None:
    """Nor a gradient, whatever the temperature."""
    logits = torch.randn(ROWS, 8).requires_grad_()
    for temperature in (0.5, 1.0, 3.0):
        targets = TopIds.of(logits.detach(), 3, temperature=temperature, vocabulary=8, axis=SINGLE)
        (found,) = row_losses(logits, [Divergence(teacher=targets, vocabulary=8, axis=SINGLE)])
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        torch.testing.assert_close(found, torch.zeros(ROWS), rtol=0, atol=5e-6)
        torch.testing.assert_close(gradient, torch.zeros(ROWS, 8), rtol=0, atol=1e-6)


def test_ties_are_taken_by_the_lowest_id() -> None:
    """In any number of spans, minus zero being zero."""
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 0.0, 1.0], [-2.0, -0.0, -2.0, 0.0, -2.0, -3.0]])
    found = TopIds.of(logits, 5, temperature=1.0, vocabulary=6, axis=SINGLE)
    assert found.ids.tolist() == [[1, 2, 5, 0, 3], [1, 3, 0, 2, 4]]


def _check_ties(_rank: int) -> None:
    world = dist.get_world_size()
    axis = TensorAxis.of(DeviceMesh("cpu", range(world), mesh_dim_names=("tp",)))
    generator = torch.Generator().manual_seed(5)
    for vocabulary in (6, 7, 11):
        span = axis.span(vocabulary)
        logits = torch.randint(-1, 2, (8 * ROWS, vocabulary), generator=generator).float()
        is_minus = torch.rand(logits.shape, generator=generator) < 0.5
        logits = torch.where((logits == 0) & is_minus, -0.0, logits)
        wanted = logits.sort(dim=1, descending=True, stable=True).indices
        for count in range(1, vocabulary + 1):
            own = logits[:, span.start : span.stop]
            found = TopIds.of(own, count, temperature=1.0, vocabulary=vocabulary, axis=axis)
            assert torch.equal(found.ids.long(), wanted[:, :count])


@pytest.mark.parametrize("world", [2, 3])
def test_ties_between_spans_are_taken_by_the_lowest_id(run_ranks: Callable[..., list[Any]], world: int) -> None:
    """Whichever rank has it, in spans as long as others or shorter, for any number of ids."""
    run_ranks(world, _check_ties)


def test_a_large_vocabulary_is_one() -> None:
    """Its likeliest ids, and all probabilities, though they are looked at a few thousand at a time; ties as ever."""
    logits = torch.randint(-9, 9, (3, 20_000), generator=torch.Generator().manual_seed(1)).float()
    found = TopIds.of(logits, 2500, temperature=2.0, vocabulary=20_000, axis=SINGLE)
    wanted = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.ids.long(), wanted.indices[:, :2500])
    exact = (logits / 2).log_softmax(1).gather(1, found.ids.long())
    torch.testing.assert_close(found.log_probabilities, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_travel_as_bytes(dtype: torch.dtype) -> None:
    """Of each id four, of its number those of the precision; ids come back as they were, numbers rounded once."""
    targets = TopIds.of(torch.randn(ROWS, 70_000), 4, temperature=2.0, vocabulary=70_000, axis=SINGLE)
    sent = targets.to_bytes(dtype)
    assert sent.shape == (ROWS, 4 * (4 + dtype.itemsize))
    found = TopIds.from_bytes(sent, dtype, temperature=2.0)
    assert torch.equal(found.ids, targets.ids)
    assert torch.equal(found.log_probabilities, targets.log_probabilities.to(dtype).float())
    for rows in (slice(0, 0), slice(1, 2), slice(3, 6)):
        odd = TopIds.of(torch.randn(ROWS, 9), 3, temperature=2.0, vocabulary=9, axis=SINGLE)
        assert torch.equal(TopIds.from_bytes(odd.to_bytes(dtype)[rows], dtype, temperature=2.0).ids, odd.ids[rows])
    none = TopIds.from_bytes(sent[:0], dtype, temperature=2.0)
    assert none.ids.shape == none.log_probabilities.shape == (0, 4)
