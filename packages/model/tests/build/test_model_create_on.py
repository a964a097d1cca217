"""Modules without storage are created without drawing values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.model.runtime import create_on


class Recorded(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


INITS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(nn.init, name)
    for name in (
        "kaiming_normal_",
        "kaiming_uniform_",
        "normal_",
        "trunc_normal_",
        "uniform_",
        "xavier_normal_",
        "xavier_uniform_",
    )
} | {"Tensor.normal_": Tensor.normal_, "Tensor.uniform_": Tensor.uniform_}


@pytest.mark.parametrize("name", INITS)
def test_nothing_is_drawn_that_holds_nothing(name: str) -> None:
    """No way of drawing initial values is run on the meta device, and each is in other tensors and on other devices."""
    with torch.no_grad(), Recorded() as recorded, create_on("meta"):
        empty = torch.empty(3, 4)
        assert INITS[name](empty) is empty
        assert recorded.names == ["empty"]
        real = torch.zeros(3, 4, device="cpu")
        assert bool(INITS[name](real).count_nonzero())
    with create_on("cpu"):
        assert bool(INITS[name](torch.zeros(3, 4)).detach().count_nonzero())


def test_a_module_without_storage_has_its_shapes_and_uses_no_random_numbers() -> None:
    """Parameters are named and shaped as ever; what is drawn afterwards is what would have been drawn."""
    torch.manual_seed(0)
    wanted = torch.randn(2)
    torch.manual_seed(0)
    with create_on("meta"):
        module = nn.TransformerEncoderLayer(8, 2, 16)
    assert torch.equal(torch.randn(2), wanted)
    assert all(parameter.is_meta for parameter in module.parameters())
    shapes = {name: parameter.shape for name, parameter in nn.TransformerEncoderLayer(8, 2, 16).named_parameters()}
    assert {name: parameter.shape for name, parameter in module.named_parameters()} == shapes
