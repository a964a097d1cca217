"""Moments of AdamW in bf16, rounded up or down by chance."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mimo.hooks import ConfigError
from mimo.optimizer import LocalAdamWConfig, local_adamw_state
from mimo.optimizer.estimates import ParameterShape, SteppedShapes
from mimo.optimizer.runtime import LocalAdamW, _bf16_moments
from mimo.optimizer.runtime._bf16_moments import rounded

SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
SHAPES = ((4, 3), (5,), (), (0, 2), (40, 40))


def _optimizer(moments: torch.dtype) -> tuple[list[nn.Parameter], LocalAdamW]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return parameters, LocalAdamW(parameters, **SETTINGS, moments=moments)


def _step(parameters: list[nn.Parameter], optimizer: LocalAdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_a_number_is_rounded_to_itself_on_average() -> None:
    """Over steps, within what chance allows; each time to one of its two neighbours, or not where bf16 has it."""
    steps = 2_000
    values = torch.randn(1_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 1_000)
    total, below = torch.zeros(1_000, dtype=torch.float64), torch.full((1_000,), torch.inf)
    for step in range(1, steps + 1):
        found = rounded(values, torch.tensor(float(step)))
        assert found.dtype == torch.bfloat16
        total += found.double()
        below = below.minimum((found.float() - values).abs())
    cut = 2.0 ** (torch.frexp(values).exponent - 8).double()  # the last bit of bf16
    errors = (total / steps - values.double()) / cut
    assert errors.abs().max() < 5 * 0.5 / steps**0.5
    assert abs(errors.mean()) < 5 * 0.5 / (steps * 1_000) ** 0.5
    held = values.to(torch.bfloat16).float()
    assert torch.equal(rounded(held, torch.tensor(3.0)).float(), held)
    assert (rounded(values, torch.tensor(1.0)).double() - values.double()).abs().lt(cut).all()


def test_an_average_that_hardly_changes_does_not_stop() -> None:
    """It falls by a thousandth a step, which rounding to the nearest would undo each time."""
    exact = torch.linspace(1.0, 2.0, 500)
    found, nearest = exact.to(torch.bfloat16), exact.to(torch.bfloat16)
    for step in range(1, 3_001):
        exact = exact * 0.999
        found = rounded(found.float() * 0.999, torch.tensor(float(step)))
        nearest = (nearest.float() * 0.999).to(torch.bfloat16)
    assert abs(float(found.float().mean() / exact.mean()) - 1) < 0.01
    assert float(nearest.float().mean() / exact.mean()) > 10


def test_steps_are_near_those_with_moments_in_fp32() -> None:
    """To what bf16 rounds off an average, and nothing is lost of the weights, which are fp32."""
    (exact, optimizer), (found, in_bf16) = _optimizer(torch.float32), _optimizer(torch.bfloat16)
    for step in range(1, 6):
        _step(exact, optimizer, step)
        _step(found, in_bf16, step)
    for mine, other in zip(found, exact, strict=True):
        state = in_bf16.state[mine]
        assert (mine.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (
            torch.float32,
            torch.bfloat16,
            torch.bfloat16,
        )
        torch.testing.assert_close(mine, other, rtol=0, atol=5 * 0.1 * 2**-6)
    assert not torch.equal(found[0], exact[0])


def test_large_parameters_are_stepped_in_chunks_to_the_same_bits() -> None:
    """However many numbers are in fp32 at one time."""
    (whole, one), (cut, other) = _optimizer(torch.bfloat16), _optimizer(torch.bfloat16)
    _step(whole, one, 1)
    with patch.object(_bf16_moments, "CHUNK", 7):
        sizes = [
            [len(row[0]) for row in chunk]
            for chunk in _bf16_moments._chunks([(torch.zeros(20), torch.ones(())), (torch.zeros(2), torch.ones(()))])
        ]
        _step(cut, other, 1)
    assert sizes == [[7], [7], [6], [2]]
    for mine, same in zip(whole, cut, strict=True):
        assert torch.equal(mine, same)
        assert torch.equal(one.state[mine]["exp_avg"], other.state[same]["exp_avg"])


def test_a_saved_state_steps_to_the_same_bits() -> None:
    """Chance depends on the step, which is saved too."""
    parameters, optimizer = _optimizer(torch.bfloat16)
    _step(parameters, optimizer, 1)
    again, resumed = _optimizer(torch.bfloat16)
    with torch.no_grad():
        for value, saved in zip(again, parameters, strict=True):
            value.copy_(saved)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for values, stepper in ((parameters, optimizer), (again, resumed)):
        _step(values, stepper, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(again, parameters, strict=True))


def test_state_is_as_large_as_estimated() -> None:
    """Four bytes of two moments, and one count for each parameter."""
    parameters, optimizer = _optimizer(torch.bfloat16)
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for states in optimizer.state.values()
        for value in states.values()
    }
    pieces = tuple(ParameterShape(name=str(one.shape), shape=tuple(one.shape)) for one in parameters)
    estimated = local_adamw_state(SteppedShapes(pieces=pieces), LocalAdamWConfig(moments="bf16"))
    assert estimated.device == sum(storages.values())


def test_moments_of_an_unknown_kind_are_refused() -> None:
    """By the setting's name."""
    with pytest.raises(ConfigError) as found:
        LocalAdamWConfig(moments="fp8")  # type: ignore[arg-type]  # what a user may write
    assert str(found.value) == "optimizer.moments: expected fp32 or bf16, got 'fp8'."
