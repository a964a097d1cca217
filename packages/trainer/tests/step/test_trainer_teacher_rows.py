"""What teachers say, as bytes and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.model.runtime import TensorAxis, TopIds
from mimo.optimizer import Precision
from mimo.trainer.config.settings import Distil
from mimo.trainer.step.programs.teacher_rows import TeacherRows

HALF = 2**-11
"""By how much fp16 rounds a number at most, relative to it."""
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("keys", [{"top_k": 3}, {"top_k": 0, "hidden": "mse"}, {"top_k": 3, "hidden": "cosine"}])
def test_rows_travel_as_bytes(precision: Precision, keys: dict[str, Any]) -> None:
    """Hidden rows in the run's precision, log-probabilities in 11 bits at least; any of the rows, and none."""
    distil, number = Distil(**keys), DTYPES[precision].itemsize
    of_probabilities = torch.float32 if precision == "fp32" else torch.float16
    logits, hidden = torch.randn(5, 9), torch.randn(5, 7)
    ids = TopIds.of(logits, 3, temperature=1.0, vocabulary=9, axis=TensorAxis.single())
    sent = TeacherRows(ids=ids if distil.top_k else None, hidden=hidden if distil.compares_hidden else None)
    found = sent.to_bytes(precision)
    assert found.dtype == torch.uint8
    assert found.shape == (5, distil.top_k * (4 + number) + (7 * number if distil.compares_hidden else 0))
    for some in (slice(0, 5), slice(1, 2), slice(3, 3)):
        back = TeacherRows.from_bytes(found[some], precision, distil)
        assert (back.ids is None) == (not distil.top_k)
        if back.ids is not None:
            assert torch.equal(back.ids.ids, ids.ids[some])
            assert torch.equal(back.ids.log_probabilities, ids.log_probabilities[some].to(of_probabilities).float())
        assert (back.hidden is None) == (not distil.compares_hidden)
        if back.hidden is not None:
            assert torch.equal(back.hidden, hidden[some].to(DTYPES[precision]))


def _divergence(student: Tensor, log_probabilities: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return in fp64 the divergence [T], and how much it may change where each log-probability is rounded [T]."""
    own = student.double().log_softmax(1)
    logs, wanted = own.gather(1, ids), log_probabilities.double()
    others, rest = (1 - logs.exp().sum(1)).log(), (1 - wanted.exp().sum(1)).log()
    gaps = wanted - logs - (rest - others).unsqueeze(1)
    found = (wanted.exp() * (wanted - logs)).sum(1) + rest.exp() * (rest - others)
    return found, HALF * (wanted.exp() * wanted.abs() * gaps.abs()).sum(1)


def test_what_is_lost_of_ids_in_bf16() -> None:
    """A divergence changes by 2^-11 of p |log p| times what is learned of each id; where that is nothing, by 2e-6."""
    teacher, student = 3 * torch.randn(2, 200, 50, generator=torch.Generator().manual_seed(3))
    ids = TopIds.of(teacher, 8, temperature=1.0, vocabulary=50, axis=TensorAxis.single())
    sent = TeacherRows(ids=ids, hidden=None).to_bytes("bf16")
    back = TeacherRows.from_bytes(sent, "bf16", Distil(top_k=8)).ids
    assert back is not None
    exact = teacher.double().log_softmax(1).gather(1, ids.ids.long())
    wanted, bound = _divergence(student, exact, ids.ids.long())
    found, _ = _divergence(student, back.log_probabilities, ids.ids.long())
    assert ((found - wanted).abs() <= 1.01 * bound + 1e-6).all()
    agreed, _ = _divergence(teacher, back.log_probabilities, ids.ids.long())
    assert agreed.max() <= 2e-6


def test_what_a_teacher_finds_impossible_stays_so() -> None:
    """Beyond the numbers of fp16: the row's loss is as if its probability were 0."""
    ids = TopIds(ids=torch.tensor([[1, 0]], dtype=torch.int32), log_probabilities=torch.tensor([[0.0, -1e6]]))
    back = TeacherRows.from_bytes(TeacherRows(ids=ids, hidden=None).to_bytes("bf16"), "bf16", Distil(top_k=2))
    assert back.ids is not None
    assert back.ids.log_probabilities.exp().tolist() == [[1.0, 0.0]]
