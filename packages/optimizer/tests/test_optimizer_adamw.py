"""AdamW by torch's fused kernel on local tensors, beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mimo.hooks import RunError
from mimo.optimizer import GRADIENT_SCALE
from mimo.optimizer.runtime import LocalAdamW, zeros_like

SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
SHAPES = ((4, 3), (5,), (), (0, 2), (40, 40))


def make() -> list[nn.Parameter]:
    """Return the same parameters each time."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(parameters: list[nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    """Give gradients that depend on the step, to all but some."""
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place in missing else gradient


@pytest.mark.parametrize("missing", [(), (1,), (0, 1, 2, 3, 4)])
def test_optimizer_adamw_is_torchs_to_the_bit(missing: tuple[int, ...]) -> None:
    """Also where some parameters have no gradient in a step, and are left as they are."""
    ours, theirs = make(), make()
    optimizer, expected = LocalAdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS, fused=True)
    for step, left_out in ((1, ()), (2, missing), (3, ())):
        for parameters, stepper in ((ours, optimizer), (theirs, expected)):
            give(parameters, step, left_out)
            stepper.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for key, value in expected.state[other].items():
            assert torch.equal(optimizer.state[mine][key], value), key


def test_optimizer_adamw_state_is_there_from_the_start() -> None:
    """A checkpoint can be loaded into it before any step: moments like the parameter, and a scalar of its own."""
    parameters = make()
    optimizer = LocalAdamW(parameters, **SETTINGS)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert {key: value.shape for key, value in state.items()} == {
            "step": torch.Size([]),
            "exp_avg": parameter.shape,
            "exp_avg_sq": parameter.shape,
        }
    optimizer.state[parameters[1]]["step"].fill_(7)
    give(parameters, 1)
    optimizer.step()
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [1, 8, 1, 1, 1]


def test_optimizer_adamw_scales_gradients_itself() -> None:
    """By what the group says, as if they had been multiplied before, and leaves them so."""
    ours, theirs = make(), make()
    optimizer, expected = LocalAdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS, fused=True)
    optimizer.param_groups[0][GRADIENT_SCALE] = 0.37
    give(ours, 1)
    give(theirs, 1)
    for parameter in theirs:
        assert parameter.grad is not None
        parameter.grad.mul_(0.37)
    optimizer.step()
    expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0.0)


def test_optimizer_adamw_resumes_from_what_was_saved() -> None:
    """Its own state or torch's, into the memory that it works on."""
    parameters = make()
    before = torch.optim.AdamW(parameters, **SETTINGS, fused=True)
    for step in (1, 2):
        give(parameters, step)
        before.step()
    ours = [nn.Parameter(value.detach().clone()) for value in parameters]
    optimizer = LocalAdamW(ours, **{**SETTINGS, "lr": 0.0})
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    for step in (3, 4):
        for values, stepper in ((ours, optimizer), (parameters, before)):
            give(values, step)
            stepper.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, parameters, strict=True))
    again = LocalAdamW(ours, **SETTINGS)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[ours[0]]["exp_avg"], optimizer.state[ours[0]]["exp_avg"])


def test_optimizer_adamw_refuses_the_state_of_others() -> None:
    """And keeps its own."""
    parameters = make()
    optimizer = LocalAdamW(parameters, **SETTINGS)
    give(parameters, 1)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(kept)
    wrong["state"][4]["exp_avg"] = torch.zeros(1)
    with pytest.raises(RunError) as error:
        optimizer.load_state_dict(wrong)
    assert str(error.value) == (
        "LocalAdamW.load_state_dict: expected exp_avg of shape (40, 40) for parameter 4, got one of shape (1,). Load "
        "what was saved with the same parameters, after a step."
    )
    with pytest.raises(RunError, match="expected step of shape \\(\\) for parameter 0, got none"):
        optimizer.load_state_dict(torch.optim.AdamW(make(), **SETTINGS).state_dict())
    assert torch.equal(kept["state"][0]["exp_avg"], optimizer.state[parameters[0]]["exp_avg"])


def _lie_as_torchs(_rank: int) -> bool:
    """Return whether zeros of parameters, cut unevenly and copied, are what torch's are on this rank."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [placement]))
        ours, theirs = zeros_like(parameter), torch.zeros_like(parameter, requires_grad=False)
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        assert (ours.placements, ours.shape, ours.stride()) == (theirs.placements, theirs.shape, theirs.stride())
        assert torch.equal(ours.to_local(), theirs.to_local())
        assert not ours.requires_grad
    return True


def test_optimizer_zeros_lie_as_their_parameter(run_ranks: Callable[..., list[Any]]) -> None:
    """Without working out how, for which torch takes longer than for the zeros."""
    assert run_ranks(2, _lie_as_torchs) == [True, True]
