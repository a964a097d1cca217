"""A plan of two ranks is right if it differs from one process by no more than rounding does, however much that is."""

import pytest
import torch
from torch import Tensor, nn

from mimo.model.runtime import Split, TensorAxis
from mimo_transformers.trial import two_ranks
from mimo_transformers.trial.tensor_plan import TensorPlan
from mimo_transformers.trial.two_ranks import find_plan, try_plan

INPUTS, WEIGHT = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
PLAN, WRONG = (
    TensorPlan(styles={"weight": "rowwise"}),
    "the gradient of weight in a small one on 2 ranks isn't that on one",
)


class Sine(nn.Module):
    """A sine of many products' sum, in which rounding of the sum counts thirty times; it learns what a loss hides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())
        self.axis = TensorAxis.single()
        self.factor = 30.0

    def forward(self) -> Tensor:
        """Compute with this rank's part of the weight."""
        mine = INPUTS.tensor_split(self.axis.size)[self.axis.rank]
        return (self.axis.leave((mine * self.weight).sum()) * self.factor).sin() + 1e5


def found(off: float) -> TensorPlan | str:
    """Return what is found of a sine that two ranks take of so many times the number."""

    def split(module: nn.Module, axis: TensorAxis, plan: TensorPlan) -> dict[str, Split]:
        assert isinstance(module, Sine)
        assert plan is PLAN
        module.axis = axis
        module.factor *= off
        return {"weight": Split(dim=0)}

    return try_plan(lambda: find_plan(Sine, lambda module: module(), split, [PLAN]))


def test_rounding_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers that count, though a gradient differs by more than it may where they don't."""
    assert found(1.0) == PLAN
    assert found(1 + 2**-23) == PLAN
    monkeypatch.setattr(two_ranks, "_ROUNDING", 0)
    assert found(1 + 2**-23) == WRONG


@pytest.mark.parametrize("off", [2e-5, 1e-3])
def test_what_is_further_off_is_refused(off: float) -> None:
    """However much rounding changes."""
    assert found(1 + off) == WRONG
