"""A plugin without estimates counts as AdamW, with everything whole on every lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mimo.optimizer.estimates import (
    Estimates,
    Lanes,
    Numbers,
    ParameterShape,
    PartShapes,
    SentBytes,
    SteppedShapes,
    adamw_state,
)
from mimo.optimizer.runtime import LocalAdamW, layers

MATRIX = ParameterShape(name="m.a", shape=(5, 3))
FROZEN = ParameterShape(name="m.b", shape=(7,), trained=False)
COUNTS = ParameterShape(name="m.c", shape=(2,), trained=False, floating=False, number_bytes=8)


def test_what_is_replicated_is_whole_on_every_lane() -> None:
    """Weights of all, gradients of what trains; a copy only for layers that compute in less than fp32."""
    laid = Estimates().laid(PartShapes(parameters=(MATRIX, FROZEN, COUNTS), lanes=Lanes(size=4, index=1)), None)
    assert (laid.weights, laid.gathered, laid.gradients) == (4 * 15 + 4 * 7 + 8 * 2, 0, 4 * 15)
    assert laid.pieces == (MATRIX,)
    half = Estimates().laid(PartShapes(parameters=(MATRIX, FROZEN, COUNTS), number_bytes=2), None)
    assert (half.weights, half.gathered) == (laid.weights, 2 * 15 + 2 * 7)


def test_adamw_holds_what_it_estimates() -> None:
    """Two moments of each number and one count of each parameter, in the storages that are really there."""
    shapes = [(5, 3), (0, 3), (7,)]
    optimizer = LocalAdamW(
        [nn.Parameter(torch.zeros(shape)) for shape in shapes], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for states in optimizer.state.values()
        for value in states.values()
    }
    pieces = tuple(ParameterShape(name=str(shape), shape=shape) for shape in shapes)
    assert adamw_state(SteppedShapes(pieces=pieces)).device == sum(storages.values())
    assert adamw_state(SteppedShapes(pieces=pieces)).host == 0


@pytest.mark.parametrize(
    ("lanes", "sent"), [(Lanes(), 0), (Lanes(size=2), 400), (Lanes(size=2, copies=2), 600), (Lanes(copies=4), 600)]
)
def test_a_sum_goes_round_a_ring(lanes: Lanes, sent: int) -> None:
    """Each rank sends nearly all of it twice, however many lanes there are; frozen parameters have none."""
    assert Estimates().sent(Numbers(trained=100, all=300, lanes=lanes), None) == SentBytes(step=sent)


def test_mean_numbers_are_equal_on_all_ranks_of_a_parameter() -> None:
    """However unevenly it is cut."""
    ranks = [ParameterShape(name="m.a", shape=(rows, 3), ranks=2, total=15) for rows in (3, 2)]
    assert [one.mean_numbers for one in ranks] == [7.5, 7.5]
    assert MATRIX.mean_numbers == 15


def test_layers_are_the_outermost_members_of_lists() -> None:
    """In order, each once, and only what can be called."""
    linear = nn.Linear(1, 1)
    inner = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]))
    stage = nn.ModuleDict({"stem": nn.Linear(1, 1)})
    stage["blocks"] = nn.ModuleList([linear, inner, nn.ModuleList([linear, nn.Linear(1, 1)])])
    holder = nn.Module()
    holder.stage = stage
    found = list(layers(holder))
    assert found[0] is stage["stem"]
    assert found[1] is linear
    assert found[2] is inner
    assert len(found) == 4
