"""Products without gradients are those with gradients, by whatever library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Counted(TorchDispatchMode):
    """Notes what oneDNN computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mkldnn" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("outputs", "count"), [(300, 1), (20, 0)])
def test_large_weights_alone_go_to_onednn(outputs: int, count: int) -> None:
    """And never where a gradient is asked for."""
    layer, x = Linear(512, outputs), torch.randn(8, 512)
    with _Counted() as counted:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        layer(x)
        assert counted.count == 0
        with torch.no_grad():
            layer(x)
    assert counted.count == count
