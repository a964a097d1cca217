"""Products without gradients are those with gradients, by whatever library."""

from __future__ import annotations

import pytest
import torch

from mimo.model.layers import Linear


@pytest.mark.parametrize("rows", [0, 1, 8, 40])
@pytest.mark.parametrize(("outputs", "bias"), [(300, True), (300, False), (20, True)])
def test_a_layer_gives_the_same_with_gradients_and_without(rows: int, outputs: int, bias: bool) -> None:
    """Of large weights and small ones, with a bias and without, of rows that lie apart too."""
    torch.manual_seed(rows)
    layer, x = Linear(512, outputs, bias=bias), torch.randn(rows, 1024)[:, ::2]
    given = layer(x)
    with torch.no_grad():
        found = layer(x)
    assert given.requires_grad
    torch.testing.assert_close(found, given.detach(), rtol=0, atol=1e-5)
