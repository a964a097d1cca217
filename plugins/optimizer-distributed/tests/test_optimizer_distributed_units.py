"""Which parameters are gathered together."""

from __future__ import annotations

from torch import nn

from mimo.optimizer.runtime import layers
from mimo_optimizer_distributed.units import owned, sort_by_layer


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.stack = nn.ModuleDict({"a": nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), "b": nn.Linear(2, 2)})
        self.nested = nn.Linear(2, 2, bias=False)
        self.deep = nn.Sequential(nn.Identity())
        self.deep.inner = nn.ModuleList([nn.ModuleList([self.nested]), nn.ParameterList()])


def test_distributed_layers_are_the_outermost_that_can_be_called() -> None:
    """Members of lists at any depth, none within another, and no containers."""
    module = _Nested()
    assert list(layers(module)) == [module.stack["a"], module.stack["b"], module.nested]


def test_distributed_a_layer_met_twice_is_one() -> None:
    """A list may hold the same layer at several places."""
    layer = nn.Linear(2, 2)
    assert list(layers(nn.ModuleDict({"list": nn.ModuleList([layer, layer])}))) == [layer]


def test_distributed_what_two_layers_share_is_of_none() -> None:
    """It is gathered for as long as either needs it."""
    module = _Nested()
    module.stack["b"].weight = module.first.weight
    found = owned([module], dict(module.named_parameters()))
    by_layer = sort_by_layer([module.stack["b"]], found)
    assert set(by_layer[module.stack["b"]]) == {"stack.b.bias"}
    assert "first.weight" in by_layer[None]
    assert len(found["first.weight"].places) == 2
