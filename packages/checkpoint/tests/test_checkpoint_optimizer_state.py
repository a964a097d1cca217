"""States of optimizers by the names of their parameters: saved, and made anew where they do not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mimo.checkpoint import OptimizerState, load, read_manifest, save
from mimo.hooks import CheckpointError, Stateful

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
RunRanks = Callable[..., list[Any]]
Make = Callable[[Iterable[Any]], Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True, momentum=0.5),
}


def make_model() -> nn.Sequential:
    """Return the same few layers each time; one is left out by the first half of all inputs."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices, and the rest with a rate of its own."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.01},
    ]


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Step by gradients that depend on a step's number alone."""
    for step in steps:
        rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


def tree_of(model: nn.Module, state: OptimizerState) -> dict[str, Any]:
    """Return what is saved."""
    return {"model": dict(model.named_parameters()), state.name: state.state()}


def resume(model: nn.Module, optimizer: Optimizer, step_folder: Path) -> None:
    """Load into a fresh model and a fresh optimizer."""
    state = OptimizerState("optimizer", optimizer, model.named_parameters())
    assert isinstance(state, Stateful)
    state.make(step_folder)
    loaded = load(step_folder, tree_of(model, state), refuse_left=True)
    state.load(loaded.tree["optimizer"])


@pytest.mark.parametrize("maker", MAKERS)
def test_a_fresh_optimizer_resumes_to_the_bit(tmp_path: Path, maker: str) -> None:
    """Its state is made from the checkpoint, its settings are those of it, whichever of torch's optimizers it is."""
    model = make_model()
    optimizer = MAKERS[maker](groups_of(model))
    train(model, optimizer, range(3))
    groups = optimizer.param_groups
    for group in groups:
        group["lr"] = group["lr"] * 0.5
    step = save(tmp_path, 3, tree_of(model, OptimizerState("optimizer", optimizer, model.named_parameters())), **ABOUT)
    train(model, optimizer, range(3, 6))

    fresh = make_model()
    again = MAKERS[maker](groups_of(fresh))
    assert not again.state
    resume(fresh, again, step)
    assert [type(group["lr"]) for group in again.param_groups] == [
        type(group["lr"]) for group in optimizer.param_groups
    ]
    train(fresh, again, range(3, 6))
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_parameters_that_never_had_a_gradient_get_no_state(tmp_path: Path) -> None:
    """What the checkpoint has no state of begins with none, as in the run that saved it."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[2].requires_grad_(requires_grad=False)
    train(model, optimizer, range(2))
    step = save(tmp_path, 2, tree_of(model, OptimizerState("optimizer", optimizer, model.named_parameters())), **ABOUT)
    fresh = make_model()
    again = torch.optim.AdamW(fresh.parameters())
    resume(fresh, again, step)
    assert {name for name, parameter in fresh.named_parameters() if parameter in again.state} == {"0.weight", "0.bias"}


def _shard(world: int) -> tuple[nn.Sequential, Optimizer]:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(tensor: Tensor) -> list[Any]:
    """Return all elements of a tensor, wherever they lie."""
    found: list[Any] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()
    return found


def _save_sharded(_rank: int, folder: Path) -> dict[str, Any]:
    model, optimizer = _shard(2)
    train(model, optimizer, range(3))
    save(folder, 3, tree_of(model, OptimizerState("optimizer", optimizer, model.named_parameters())), **ABOUT)
    return {name: whole(optimizer.state[parameter]["exp_avg"]) for name, parameter in model.named_parameters()}


def _load_sharded(_rank: int, folder: Path, world: int) -> dict[str, Any]:
    model, optimizer = _shard(world)
    resume(model, optimizer, folder / "step_00000003")
    found = {}
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert isinstance(parameter, DTensor)
        assert moment.placements == parameter.placements
        found[name] = whole(moment)
    train(model, optimizer, [3])
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_state_is_made_in_any_layout(run_ranks: RunRanks, tmp_path: Path, world: int) -> None:
    """Two ranks save what FSDP2 has spread; moments made on one or three lie as their parameters do."""
    saved = run_ranks(2, _save_sharded, tmp_path)[0]
    assert read_manifest(tmp_path / "step_00000003").tensors["optimizer.state.0.weight.exp_avg"].shape == (7, 4)
    assert run_ranks(world, _load_sharded, tmp_path, world) == [saved] * world


def test_a_parameter_without_a_name_is_refused() -> None:
    """It would be lost."""
    model = make_model()
    with pytest.raises(CheckpointError, match=r"^adam: expected a name .*, got none for 1 of 4, .* shape \[3\]\. Give"):
        OptimizerState("adam", torch.optim.AdamW(model.parameters()), list(model.named_parameters())[:3])


def test_other_groups_are_refused(tmp_path: Path) -> None:
    """Settings of groups are those of the same groups."""
    model = make_model()
    optimizer = torch.optim.AdamW(groups_of(model))
    step = save(tmp_path, 1, tree_of(model, OptimizerState("optimizer", optimizer, model.named_parameters())), **ABOUT)
    with pytest.raises(CheckpointError, match=r"^optimizer\.groups: expected settings of 1 groups .*, got those of 2"):
        resume(model, torch.optim.AdamW(model.parameters()), step)


def _make_rows_alone(_rank: int, folder: Path) -> str:
    model, _ = _shard(2)
    state = OptimizerState("optimizer", torch.optim.Adafactor(model.parameters()), model.named_parameters())
    with pytest.raises(CheckpointError) as error:
        state.make(folder / "step_00000003")
    assert not state.state()["state"]
    return str(error.value)


def test_state_that_cannot_be_cut_as_its_parameter_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Sums of rows and columns of a parameter that is spread: every rank hears of it, and nothing is made."""
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, range(3))
    save(tmp_path, 3, tree_of(model, OptimizerState("optimizer", optimizer, model.named_parameters())), **ABOUT)
    for text in run_ranks(2, _make_rows_alone, tmp_path):
        assert text.startswith(
            "optimizer.state.0.weight.col_var: expected state of the parameter's shape, [7, 4], or a "
        )


def test_what_cannot_be_read_is_refused_on_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A rank without the file leaves no other one waiting."""

    def work(rank: int) -> str:
        model = make_model()
        state = OptimizerState("optimizer", torch.optim.AdamW(model.parameters()), model.named_parameters())
        with pytest.raises(CheckpointError) as error:
            state.make(tmp_path / ("nowhere" if rank else "step_00000001"))
        return str(error.value)

    model = make_model()
    save(tmp_path, 1, {"model": dict(model.named_parameters())}, **ABOUT)
    first, second = run_ranks(2, work)
    assert first == second
    assert "nowhere" in first
