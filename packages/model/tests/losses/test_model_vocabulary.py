"""Cross-entropy and argmax over a vocabulary in pieces, against the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from mimo.model.runtime import Embedding, TensorAxis, vocabulary_argmax, vocabulary_cross_entropy


def _check_vocabulary(rank: int, vocabulary: int) -> None:
    world = dist.get_world_size()
    axis = TensorAxis.of(DeviceMesh("cpu", range(world), mesh_dim_names=("tp",)))
    span = axis.span(vocabulary)
    columns = slice(span.start, span.stop)
    torch.manual_seed(vocabulary)
    for scale in (1.0, 1e4):  # exp of the second overflows unless the largest logit is taken out
        whole = (torch.randn(6, vocabulary) * scale).requires_grad_()
        labels = torch.arange(6) % vocabulary
        gradient = torch.randn(6)
        wanted = functional.cross_entropy(whole, labels, reduction="none")
        wanted.backward(gradient)
        assert whole.grad is not None
        for overwrites in (False, True):
            mine = whole.detach()[:, columns].clone().requires_grad_()
            given = mine.clone()
            found = vocabulary_cross_entropy(given, labels, vocabulary=vocabulary, axis=axis, overwrites=overwrites)
            found.backward(gradient)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(mine.grad, whole.grad[:, columns], rtol=1e-5, atol=1e-6)
            assert overwrites or torch.equal(given, mine)
        half = mine.detach().bfloat16()
        assert vocabulary_cross_entropy(half, labels, vocabulary=vocabulary, axis=axis).dtype == torch.float32

    ties = torch.zeros(3, vocabulary)
    ties[1, vocabulary // 2 :] = 1.0
    ties[2, -1] = 2.0
    found_ids = vocabulary_argmax(ties[:, columns], vocabulary=vocabulary, axis=axis)
    assert found_ids.tolist() == [0, vocabulary // 2, vocabulary - 1]


@pytest.mark.parametrize(("world", "vocabulary"), [(1, 7), (2, 7), (3, 11), (4, 5)])
def test_split_vocabulary_equals_whole(run_ranks: Callable[..., list[Any]], world: int, vocabulary: int) -> None:
    """Losses, gradients and argmax (lowest id first) are those of the whole vocabulary; uneven and empty spans too."""
    run_ranks(world, _check_vocabulary, vocabulary)


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_second_backward_is_refused(overwrites: bool) -> None:
    """Since the first one computes in what is kept, which would be wrong gradients."""
    logits = torch.randn(2, 5, requires_grad=True)
    loss = vocabulary_cross_entropy(
        logits.clone(), torch.tensor([0, 4]), vocabulary=5, axis=TensorAxis.single(), overwrites=overwrites
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _check_embedding(rank: int, sequence_parallel: bool) -> None:
    world = dist.get_world_size()
    axis = TensorAxis.of(DeviceMesh("cpu", range(world), mesh_dim_names=("tp",)), sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    whole = torch.randn(5, 3)
    ids = torch.tensor([4, 0, 2, 2, 1, 3, 0, 4])
    gradient = torch.randn(8, 3)
    wanted = torch.zeros(5, 3).index_add_(0, ids, gradient)
    span, rows = axis.span(5), axis.span(8) if sequence_parallel else range(8)
    embedding = Embedding(5, 3)
    embedding.weight = torch.nn.Parameter(whole[span.start : span.stop].clone())
    embedding.axis = axis
    found = embedding(ids)
    assert torch.equal(found, whole[ids][rows.start : rows.stop])
    found.backward(gradient[rows.start : rows.stop])
    torch.testing.assert_close(embedding.weight.grad, wanted[span.start : span.stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_with_a_rank_without_ids(run_ranks: Callable[..., list[Any]], sequence_parallel: bool) -> None:
    """Five ids over four ranks leave the last none, and it still takes part in backward."""
    run_ranks(4, _check_embedding, sequence_parallel)
