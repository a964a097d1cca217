"""What the optimizer is made of: tensors with or without names, and groups with settings of their own, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

STEPS = 5


def make_model() -> nn.Sequential:
    """Return the same few layers each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the weights after a few steps."""
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual two groups: matrices, and what is not decayed, which is stepped faster too."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": (parameter for parameter in parameters if parameter.dim() < 2), "weight_decay": 0.0, "lr": 0.1},
    ]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "tensors": lambda model: model.parameters(),
    "pairs": lambda model: model.named_parameters(),
    "mapping": lambda model: dict(model.named_parameters()),
    "one group": lambda model: [{"params": model.named_parameters(), "lr": 1e-2}],
}


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_come_in_every_way_that_torch_knows(way: str, fraction: float) -> None:
    """The steps are those of torch's AdamW, to rounding, wherever the state lies."""
    expected, model = make_model(), make_model()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    right = train(expected, torch.optim.AdamW(expected.parameters(), **settings))
    found = train(model, HybridDeviceOptimizer(WAYS[way](model), fraction=fraction, **settings))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_groups_have_settings_of_their_own(fraction: float) -> None:
    """Rate and decay of a group go before those of the optimizer, on the host and on the device."""
    expected, model = make_model(), make_model()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    right = train(expected, torch.optim.AdamW(by_dimension(expected), **settings))
    optimizer = HybridDeviceOptimizer(by_dimension(model), fraction=fraction, **settings)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.1]
    torch.testing.assert_close(train(model, optimizer), right, rtol=1e-6, atol=1e-6)


def test_a_schedule_of_torch_sets_the_rates_of_all_groups() -> None:
    """`torch.optim.lr_scheduler` reads and writes groups as it finds them."""
    model = make_model()
    optimizer = HybridDeviceOptimizer(by_dimension(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 0.05]


def test_bare_tensors_are_called_by_number() -> None:
    """Tensors that are no parameters of a module are stepped, and waited for by their number among all."""
    tensors = [torch.full((3,), 2.0, requires_grad=True) for _ in range(4)]
    optimizer = HybridDeviceOptimizer(
        [{"params": tensors[:1]}, {"params": tensors[1:]}], fraction=0.5, lr=0.1, weight_decay=0.0, overlaps=True
    )
    for tensor in tensors:
        tensor.grad = torch.ones(3)
    optimizer.gradients_final(["2", "3"])
    optimizer.step()
    optimizer.wait(["2", "3"])
    assert all(torch.allclose(tensor, torch.full((3,), 1.9)) for tensor in tensors[2:])
    optimizer.wait_all()
    assert all(torch.allclose(tensor, torch.full((3,), 1.9)) for tensor in tensors)


def test_state_is_taken_back_by_groups() -> None:
    """A fresh optimizer with the same groups resumes from the state of another."""
    expected, model = make_model(), make_model()
    straight = HybridDeviceOptimizer(by_dimension(expected), fraction=0.5, lr=1e-2)
    train(expected, straight)
    first = HybridDeviceOptimizer(by_dimension(model), fraction=0.5, lr=1e-2)
    train(model, first)
    second = HybridDeviceOptimizer(by_dimension(model), fraction=1, lr=1e-2)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, train(model, second), train(expected, straight)))


@pytest.mark.parametrize(
    ("parameters", "kind", "text"),
    [
        ([torch.zeros(2), "weight"], TypeError, "expected tensors as parameters, got a str: 1"),
        ([torch.zeros(2)] * 2, ValueError, "expected each parameter once, with a name of its own, got '0' twice"),
        ([("a", torch.zeros(2)), ("a", torch.ones(2))], ValueError, "got the name 'a' twice"),
        ([], ValueError, "empty parameter list"),
    ],
)
def test_other_parameters_are_refused(parameters: Any, kind: type[Exception], text: str) -> None:
    """By what is wrong with them."""
    with pytest.raises(kind, match=text):
        HybridDeviceOptimizer(parameters)
