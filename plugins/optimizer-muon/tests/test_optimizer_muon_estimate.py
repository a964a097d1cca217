"""What Muon's optimizer holds, estimated from shapes."""

from __future__ import annotations

import torch
from torch import nn

from mimo.optimizer.estimates import ParameterShape, SteppedShapes
from mimo_optimizer_muon import MUON, MuonConfig
from mimo_optimizer_muon._muon import ShardedMuon, has_matrices
from mimo_optimizer_muon._plugin import is_for_adamw

SHAPES = {"m.head.weight": (4, 3), "m.layers.0.weight": (5, 3), "m.layers.0.bias": (5,), "m.cube": (2, 2, 2)}


def test_matrices_have_one_momentum_and_the_rest_two_moments() -> None:
    """In the storages that are really there; matrices that AdamW is given by name have its state."""
    config = MuonConfig()
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    matrices = {name for name, one in parameters.items() if has_matrices(one) and not is_for_adamw(name, config.adamw)}
    assert matrices == {"m.layers.0.weight"}
    optimizer = ShardedMuon(
        [parameters[name] for name in matrices],
        [one for name, one in parameters.items() if name not in matrices],
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        iterations=5,
        adjust_lr="original",
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    held = [value.untyped_storage() for states in optimizer.state.values() for value in states.values()]
    pieces = tuple(ParameterShape(name=name, shape=shape) for name, shape in SHAPES.items())
    estimate = MUON.estimates.state(SteppedShapes(pieces=pieces), config)
    assert estimate.device == sum({one.data_ptr(): one.nbytes() for one in held}.values())
    assert estimate.host == 0


def test_a_stack_of_experts_is_of_matrices() -> None:
    """Other parameters of three dims are not."""
    stack = ParameterShape(name="m.experts", shape=(2, 3, 3), experts=True)
    assert MUON.estimates.state(SteppedShapes(pieces=(stack,)), MuonConfig()).device == 4 * 18
