"""Row-wise operations equal what PyTorch puts together from small steps, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.language.rotary import Rotation
from mimo.model.layers.norms import rms_norm

EPS = 1e-5


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _both(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result and the gradients of the inputs under a drawn gradient."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    found = function(*leaves)
    gradients = torch.autograd.grad(found, leaves, _drawn(*found.shape).to(found))
    return [found.detach(), *gradients]


def _close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert float((one.double() - other).norm()) <= bound * float(other.norm())


def test_rows_in_float64_are_turned_in_float64() -> None:
    """A pair that is turned forth and back is what it was, to its own precision, and so is its gradient."""
    x, angles = _drawn(5, 2, 8).double(), _drawn(5, 4).double()
    forth = Rotation.by(angles)
    (turned,) = forth.turn(x)
    assert turned.dtype == torch.float64
    (back,) = Rotation.by(-angles).turn(turned)
    assert float((back - x).abs().max()) < 1e-14
    (gradient,) = torch.autograd.grad(forth.turn(x.requires_grad_()), x, turned, materialize_grads=True)
    assert float((gradient - x.detach()).abs().max()) < 1e-14


def check_norm(_rank: int, rows: int, size: float) -> None:
    """Compare with torch in float64."""
    x, weight = _drawn(rows, 48) * size, 1 + 0.3 * _drawn(48)
    x[::3] *= 1e-3  # rows near eps too
    expected = _both(lambda x, weight: functional.rms_norm(x, (48,), weight, EPS), x.double(), weight.double())
    _close(_both(lambda x, weight: rms_norm(x, weight, EPS), x, weight), expected, 1e-6)


@pytest.mark.parametrize("rows", [0, 1, 257])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_norm_and_its_gradients_are_those_of_torch(run_ranks: Callable[..., Any], rows: int, size: float) -> None:
    """Rows of any length, near eps or far above it, none included."""
    run_ranks(1, check_norm, rows, size)


def check_half(_rank: int) -> None:
    """Compare with torch in bfloat16."""
    x, weight = _drawn(5, 48).bfloat16(), _drawn(48).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), functional.rms_norm(x, (48,), weight, EPS))


def test_a_norm_in_half_precision_is_left_to_torch(run_ranks: Callable[..., Any]) -> None:
    """It knows in which precision to add up."""
    run_ranks(1, check_half)


def _composite(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines), -1)


def check_turn(_rank: int, rows: int) -> None:
    """Compare with the textbook's form in float64."""
    angles = 7 * _drawn(rows, 4)
    turned = Rotation.by(angles)
    cosines, sines = angles.double().cos().unsqueeze(1), angles.double().sin().unsqueeze(1)
    x = _drawn(rows, 6, 8)[:, ::2]  # not contiguous
    expected = _both(lambda x: _composite(x, cosines, sines), x.double())
    _close(_both(lambda x: turned.turn(x)[0], x), expected, 1e-6)
    (half,) = turned.turn(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert half.is_contiguous()


@pytest.mark.parametrize("rows", [0, 1, 33, 6_000])
def test_a_turn_and_its_gradient_are_those_of_the_textbook(run_ranks: Callable[..., Any], rows: int) -> None:
    """Heads that lie apart in memory included."""
    run_ranks(1, check_turn, rows)
