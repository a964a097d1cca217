"""Steps of the optimizer in a plain loop: to the bit those of AdamW on one device, whatever happens to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.hooks import ConfigError, RunError
from mimo.optimizer import GRADIENT_SCALE
from mimo.optimizer.runtime import LocalAdamW
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

SHAPES = {"first": (37, 11), "norm": (11,), "large": (90_001,), "empty": (0, 4), "scalar": (), "last": (5, 7, 13)}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FRACTIONS: list[float | Literal["auto"]] = [0, 0.3, 1, "auto"]
STEPS = 10
Parameters = dict[str, nn.Parameter]


def numbers(name: str, salt: int) -> Tensor:
    """Return numbers that depend on a name and ``salt`` alone."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + salt)
    return torch.randn(SHAPES[name], generator=generator)


def make() -> Parameters:
    """Return parameters as they are before the first step."""
    return {name: nn.Parameter(numbers(name, 0)) for name in SHAPES}


def hybrid(parameters: Mapping[str, nn.Parameter], **more: Any) -> HybridDeviceOptimizer:
    """Return the optimizer with small buckets, of which few are staged."""
    settings = {"bucket_bytes": 40_000, "staging_bytes": 80_000, "fraction": 1, **SETTINGS, **more}
    return HybridDeviceOptimizer(parameters, **settings)


def give(parameters: Mapping[str, nn.Parameter], step: int, but: tuple[str, ...] = ()) -> None:
    """Give all parameters the gradients of a step, but some."""
    for name, parameter in parameters.items():
        parameter.grad = None if name in but else numbers(name, step)


def same(one: Any, other: Any) -> bool:
    """Return whether parameters, or optimizers' states by name, are equal to the bit."""
    return all(torch.equal(one[name], other[name]) for name in SHAPES)


def states(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, dict[str, Tensor]]:
    """Return the state of each parameter by name."""
    return {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}


def all_same(ours: HybridDeviceOptimizer, parameters: Parameters, plain: LocalAdamW, expected: Parameters) -> bool:
    """Return whether parameters and all state are equal to the bit."""
    found, right = states(ours, parameters), states(plain, expected)
    return same(parameters, expected) and all(
        found[name].keys() == right[name].keys()
        and all(torch.equal(found[name][key], right[name][key]) for key in right[name])
        for name in SHAPES
    )


@pytest.mark.parametrize("early", [True, False], ids=["staged early", "staged late"])
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_ten_steps_equal_adamw_to_the_bit(fraction: float, scale: float, early: bool) -> None:
    """Values and state, with gradients that both scale or not."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters, fraction=fraction), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, STEPS + 1):
        give(parameters, step)
        give(expected, step)
        if early:
            ours.gradients_final(parameters)
        for optimizer in (ours, plain):
            optimizer.param_groups[0][GRADIENT_SCALE] = scale
        ours.step()
        plain.step()
        assert all_same(ours, parameters, plain, expected), step


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_is_there_before_any_step(fraction: float) -> None:
    """Zeros of the parameter's shape, and nothing was stepped for it."""
    parameters = make()
    ours = hybrid(parameters, fraction=fraction)
    plain = LocalAdamW(expected.values(), **SETTINGS) if (expected := make()) else None
    assert plain is not None
    assert all_same(ours, parameters, plain, expected)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_parameter_without_gradient_is_left_alone(fraction: float) -> None:
    """Neither its last gradient nor weight decay is applied, and its steps are not counted; the next is as usual."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters, fraction=fraction), LocalAdamW(expected.values(), **SETTINGS)
    for step, but in enumerate([(), ("norm", "large"), tuple(SHAPES), ("last",), ()], 1):
        give(parameters, step, but)
        give(expected, step, but)
        ours.gradients_final(parameters)
        before = {name: value.detach().clone() for name, value in parameters.items()}
        ours.step()
        plain.step()
        assert all(torch.equal(parameters[name], before[name]) for name in but)
        assert all_same(ours, parameters, plain, expected), step


def test_gradients_that_change_after_they_were_staged_count_as_they_are() -> None:
    """Those that are written to, replaced or taken away; and those of a step that was skipped never count."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, 4):
        give(parameters, 100 + step)
        ours.gradients_final(parameters)  # and no step
        give(parameters, step)
        ours.gradients_final(parameters)
        give(expected, step)
        for found in (parameters, expected):
            found["first"].grad = numbers("first", 50)
            found["norm"].grad = None
            assert found["large"].grad is not None
            found["large"].grad *= 3
        ours.step()
        plain.step()
        assert all_same(ours, parameters, plain, expected), step


def test_gradients_are_staged_as_soon_as_they_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step then copies down only what had no buffer."""
    parameters = make()
    ours = hybrid(parameters, staging_bytes=1 << 30)
    give(parameters, 1)
    ours.gradients_final(["first", "large"])
    ours.gradients_final(["norm", "scalar", "of another module"])
    copied: list[int] = []
    copy = type(ours._host._staging._lane).copy

    def watched(lane: Any, targets: Any, sources: Any) -> None:
        if lane is ours._host._staging._lane:
            copied.extend(source.numel() for source in sources)
        copy(lane, targets, sources)

    monkeypatch.setattr("mimo_optimizer_hybrid._lane.Lane.copy", watched)
    ours.step()
    assert copied == [parameters["last"].numel()]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_settings_that_change_between_steps_reach_both_halves(fraction: float) -> None:
    """Learning rate, weight decay and betas, of each group of parameters its own."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters, fraction=fraction), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, 5):
        give(parameters, step)
        give(expected, step)
        for optimizer in (ours, plain):
            optimizer.param_groups[0] |= {"lr": 0.1 / step, "weight_decay": 0.02 * step, "betas": (0.8, 0.9)}
        ours.step()
        plain.step()
        assert all_same(ours, parameters, plain, expected), step
    ours.param_groups[0]["lr"] = 0.0
    before = {name: value.detach().clone() for name, value in parameters.items()}
    ours.step()
    assert same(parameters, before)


def test_groups_have_settings_of_their_own() -> None:
    """Also two groups with parameters in one bucket."""
    parameters, expected = make(), make()
    ours = hybrid(parameters, bucket_bytes=1 << 20)
    groups = [["first", "large", "empty"], ["norm", "scalar", "last"]]
    ours.param_groups[0]["params"] = [parameters[name] for name in groups[0]]
    ours.add_param_group({**SETTINGS, "lr": 0.5, "params": [parameters[name] for name in groups[1]]})
    plains = [
        LocalAdamW([expected[name] for name in names], **{**SETTINGS, "lr": lr})
        for names, lr in zip(groups, (SETTINGS["lr"], 0.5), strict=True)
    ]
    for step in range(1, 4):
        give(parameters, step)
        give(expected, step)
        for optimizer in (ours, *plains):
            optimizer.step()
        assert same(parameters, expected), step


def _copy(parameters: Parameters, values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _load(parameters: Parameters, values: Mapping[str, Tensor]) -> None:
    module = nn.ParameterDict(parameters)
    module.load_state_dict(dict(values))


def _fill(parameters: Parameters, values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.detach().copy_(values[name])


def _replace(parameters: Parameters, values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.data = values[name].clone()


@pytest.mark.parametrize("write", [_copy, _load, _fill, _replace])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_new_values_of_parameters_are_those_that_are_stepped(
    fraction: float, write: Callable[[Parameters, Mapping[str, Tensor]], None]
) -> None:
    """No copy in host memory brings back what they were before."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters, fraction=fraction), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, 4):
        give(parameters, step)
        give(expected, step)
        with torch.no_grad():
            if step > 1:
                values = {name: numbers(name, 70 + step) for name in SHAPES}
                write(parameters, values)
                _copy(expected, values)
        ours.step()
        plain.step()
        assert same(parameters, expected), step


def test_values_written_past_torch_are_read_after_synchronize() -> None:
    """That is what a reader of checkpoints announces itself by."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, 4):
        ours.synchronize()
        values = {name: numbers(name, 70 + step) for name in SHAPES}
        for name, parameter in parameters.items():
            parameter.data.copy_(values[name])
        with torch.no_grad():
            _copy(expected, values)
        give(parameters, step)
        give(expected, step)
        ours.step()
        plain.step()
        assert same(parameters, expected), step


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_resumes_in_another_optimizer(fraction: float) -> None:
    """From ours to AdamW and back, and to ours of another fraction, as if nothing had been stopped."""
    parameters, expected = make(), make()
    plain = LocalAdamW(expected.values(), **SETTINGS)
    step, ours = 0, hybrid(parameters, fraction=fraction)
    for following in (1, fraction, 0, 0.6):
        for _ in range(2):
            step += 1
            give(parameters, step)
            give(expected, step)
            ours.step()
            plain.step()
        saved = ours.state_dict()
        assert all_same(ours, parameters, plain, expected), step
        parameters = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
        ours = hybrid(parameters, fraction=following, lr=0.0)
        ours.load_state_dict(saved)
        assert ours.held == ours.promised
    plain = LocalAdamW(expected.values(), **SETTINGS)
    with pytest.raises(RunError) as error:
        hybrid({"first": parameters["first"]}).load_state_dict(saved)
    assert str(error.value) == (
        "HybridDeviceOptimizer.load_state_dict: expected the state of 1 parameters in 1 groups, got that of 6 in 1. "
        "Load what was saved with the same parameters."
    )


def test_state_is_loaded_from_torch() -> None:
    """`torch.optim.AdamW` has it by the same names and meaning."""
    parameters, expected = make(), make()
    plain = torch.optim.AdamW(expected.values(), fused=True, **SETTINGS)
    for step in range(1, 3):
        give(expected, step)
        plain.step()
    with torch.no_grad():
        _copy(parameters, expected)
    ours = hybrid(parameters, lr=0.0)
    ours.load_state_dict(plain.state_dict())
    assert ours.param_groups[0]["lr"] == SETTINGS["lr"]
    give(parameters, 3)
    give(expected, 3)
    ours.step()
    plain.step()
    assert same(parameters, expected)


def test_gradients_may_be_zeroed_in_place_while_the_thread_reads_them() -> None:
    """They are waited for."""
    parameters, expected = make(), make()
    ours, plain = hybrid(parameters, overlaps=True), LocalAdamW(expected.values(), **SETTINGS)
    for step in range(1, 4):
        for name in SHAPES:
            for found in (parameters, expected):
                before, gradient = found[name].grad, numbers(name, step)
                found[name].grad = gradient if before is None else before.add_(gradient)
        ours.step()
        plain.step()
        ours.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
    ours.wait_all()
    assert same(parameters, expected)


def test_parameters_may_lie_in_memory_in_any_order() -> None:
    """One that is not contiguous is stepped like any other."""
    values, gradient = torch.randn(300, 41), torch.randn(300, 41)
    parameter, expected = nn.Parameter(values.clone().t()), nn.Parameter(values.t().contiguous())
    ours, plain = hybrid({"turned": parameter}), LocalAdamW([expected], **SETTINGS)
    for _ in range(3):
        parameter.grad, expected.grad = gradient.clone().t(), gradient.t().contiguous()
        ours.gradients_final(["turned"])
        ours.step()
        plain.step()
    assert not parameter.is_contiguous()
    assert torch.equal(parameter, expected)


def here(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor."""
    assert isinstance(value, DTensor)
    return value.to_local()


def spread(rank: int) -> list[bool]:
    """Step DTensors, cut unevenly over two ranks, some with nothing here, as AdamW does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))

    def lay(name: str, salt: int) -> DTensor:
        whole = numbers(name, salt)
        placement = Replicate() if name in ("scalar", "norm") else Shard(0)
        local = [*whole.chunk(2), whole[:0]][rank] if placement == Shard(0) else whole
        return DTensor.from_local(
            local.contiguous(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    found, expected = ({name: nn.Parameter(lay(name, 0)) for name in SHAPES} for _ in range(2))
    ours, plain = hybrid(found, fraction=0.9), LocalAdamW(expected.values(), **SETTINGS)
    equal = []
    for step in range(1, 4):
        for name in SHAPES:
            found[name].grad, expected[name].grad = lay(name, step), lay(name, step)
        ours.gradients_final(found)
        if step == 3:  # as a checkpoint fills the pieces of a parameter
            ours.synchronize()
            for both in (found, expected):
                here(both["large"].detach()).detach().copy_(here(lay("large", 9)))
        ours.step()
        plain.step()
        for name in SHAPES:
            state, right = ours.state[found[name]], plain.state[expected[name]]
            equal += [torch.equal(here(found[name]), here(expected[name]))]
            for key in ("exp_avg", "exp_avg_sq"):
                assert isinstance(state[key], DTensor)
                equal += [
                    state[key].shape == right[key].shape,
                    state[key].placements == right[key].placements,
                    torch.equal(state[key].to_local(), right[key].to_local()),
                ]
    return equal


def test_dtensors_are_stepped_by_their_local_parts(run_ranks: Callable[..., list[Any]]) -> None:
    """Their state is DTensors of the same placement, and values that are written to a local part count."""
    assert all(all(equal) for equal in run_ranks(2, spread))


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    """By the path of the setting."""
    with pytest.raises(ConfigError) as error:
        hybrid(make(), fraction=fraction)
    assert str(error.value) == (
        "optimizer.fraction: expected the share of the optimizer's state that the host holds, from 0 to 1, or 'auto', "
        f"got {fraction!r}. 0 leaves all on the device, 1 holds all in host memory."
    )


def test_parameters_in_another_precision_are_refused() -> None:
    """Masters of such weights are what the parameters themselves should be."""
    with pytest.raises(RunError) as error:
        hybrid({"fine": nn.Parameter(torch.zeros(2)), "half": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))})
    assert str(error.value) == (
        "HybridDeviceOptimizer: half: expected an fp32 parameter, got torch.bfloat16. "
        "Keep weights in fp32 and let layers compute in less: run.precision."
    )


def test_parameters_that_come_later_are_refused() -> None:
    """Memory was asked for those that were there."""
    with pytest.raises(RunError) as error:
        hybrid(make()).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert str(error.value) == (
        "HybridDeviceOptimizer.add_param_group: expected parameters that it was made of, "
        "got others, for which no memory was asked. Make it of all parameters at once."
    )
