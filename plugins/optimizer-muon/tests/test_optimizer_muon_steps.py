"""Steps of the optimizer on pieces of matrices against torch's own on whole ones, fed the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import _muon as torch_muon

from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_muon import MUON, MuonConfig

SHAPES = {
    "language.embedding.weight": (11, 6),
    "language.up.weight": (7, 6),
    "language.down.weight": (6, 7),
    "language.norm.weight": (6,),
    "language.key.weight": (2, 6),
    "language.wide.weight": (3, 40),
    "language.tall.weight": (50, 4),
    "language.positions": (1, 5, 6),
    "language.head.weight": (11, 6),
}
EXPERTS = {"language.experts.up": (5, 7, 6), "language.experts.down": (5, 6, 7)}
BY_ADAMW = {
    "language.embedding.weight",
    "language.norm.weight",
    "language.positions",
    "language.head.weight",
}
STEPS, RATE = 3, 0.02
CONFIG = MuonConfig(adjust_lr="match_rms_adamw")
Layout = tuple[tuple[str, ...], tuple[int, ...], Mapping[str, Sequence[Placement]]]
"""Names and sizes of the axes of a mesh, and how parameters lie on it; those left out are copied."""
CUT0: Placement = Shard(0)
CUT1: Placement = Shard(1)
CUT2: Placement = Shard(2)
COPY: Placement = Replicate()
TENSOR = {
    "language.embedding.weight": [CUT0],
    "language.up.weight": [CUT0],
    "language.down.weight": [CUT1],
    "language.wide.weight": [CUT1],
    "language.tall.weight": [CUT0],
}
BOTH = {name: [placement, CUT0] for name, (placement,) in TENSOR.items()}
LAYOUTS: dict[str, Layout] = {
    "one rank": (("tp",), (1,), {}),
    "two tensor ranks": (("tp",), (2,), TENSOR),
    "three tensor ranks, unevenly": (("tp",), (3,), TENSOR),
    "four data ranks, empty pieces": (("data",), (4,), {name: [CUT0] for name in SHAPES}),
    "tensor by data": (("tp", "data"), (2, 2), {name: BOTH.get(name, [COPY, CUT0]) for name in SHAPES}),
    "data by tensor": (("data", "tp"), (2, 2), {name: [CUT0, one] for name, (one,) in TENSOR.items()}),
    "replicas": (("replica", "data"), (2, 2), {name: [COPY, CUT0] for name in SHAPES}),
    "three axes": (("replica", "tp", "data"), (1, 2, 2), {name: [COPY, *both] for name, both in BOTH.items()}),
}
EXPERT_LAYOUTS: dict[str, Layout] = {
    "one rank": (("ep", "etp"), (1, 1), {}),
    "ep4, one rank without experts": (("ep", "etp"), (4, 1), {name: [CUT0, COPY] for name in EXPERTS}),
    "etp2": (("ep", "etp"), (1, 2), {"language.experts.up": [COPY, CUT1], "language.experts.down": [COPY, CUT2]}),
    "ep2 etp2": (("ep", "etp"), (2, 2), {"language.experts.up": [CUT0, CUT1], "language.experts.down": [CUT0, CUT2]}),
    "etp3, unevenly": (
        ("ep", "etp"),
        (1, 3),
        {"language.experts.up": [CUT0, CUT1], "language.experts.down": [CUT0, CUT2]},
    ),
    "etp2 by data": (
        ("ep", "etp", "data"),
        (1, 2, 2),
        {"language.experts.up": [CUT0, CUT1, CUT0], "language.experts.down": [CUT0, CUT2, CUT0]},
    ),
}


def full(name: str, salt: int) -> Tensor:
    """Return numbers that depend on a name and ``salt`` only."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + salt)
    return torch.randn({**SHAPES, **EXPERTS}[name], generator=generator)


def reference(_rank: int, names: Sequence[str], config: MuonConfig) -> dict[str, Tensor]:
    """Return weights after a few steps of torch's own optimizers over whole parameters, each expert by itself."""
    weights = {name: nn.Parameter(full(name, 0)) for name in names}
    stacks = {name: [nn.Parameter(one) for one in full(name, 0)] for name in names if name in EXPERTS}
    matrices = [weights[name] for name in names if name not in BY_ADAMW and name not in EXPERTS]
    muon = torch.optim.Muon(
        matrices + [one for stack in stacks.values() for one in stack],
        lr=RATE,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.iterations,
        adjust_lr_fn=config.adjust_lr,
    )
    adamw = torch.optim.AdamW(
        [nn.Parameter(torch.zeros(1)), *(weights[name] for name in names if name in BY_ADAMW)],
        lr=RATE,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for step in range(1, STEPS + 1):
        for name in names:
            weights[name].grad = full(name, step)
            for one, gradient in zip(stacks.get(name, ()), full(name, step), strict=False):
                one.grad = gradient.clone()
        muon.step()
        adamw.step()
    return {
        name: torch.stack([one.detach() for one in stacks[name]]) if name in stacks else weights[name].detach()
        for name in names
    }


def lay(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut ``whole`` along one axis after the other, as parameters are."""
    piece, place = whole, mesh.get_coordinate()
    assert place is not None
    for axis, (placement, at) in enumerate(zip(placements, place, strict=True)):
        if isinstance(placement, Shard):
            pieces = piece.chunk(mesh.size(axis), placement.dim) if piece.shape[placement.dim] else (piece,)
            piece = pieces[at] if at < len(pieces) else piece.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        piece.contiguous().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def meshes_of(rank: int) -> Meshes:
    """Return the meshes of a module that needs none, since ``build`` takes what parameters lie on from themselves."""
    grid = Grid(name="language", ranks=(0,))
    return Meshes(ModuleGraph(modules=(Module(grid=grid, trains=(True,)),), arrows=()), rank=rank, device_type="cpu")


def train(rank: int, names: Sequence[str], layout: Layout, config: MuonConfig) -> dict[str, Tensor]:
    """Return whole weights after the same steps of the plugin on this rank's pieces."""
    axes, sizes, placed = layout
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    layouts = {name: placed.get(name, [COPY] * len(sizes)) for name in names}
    parameters = {name: nn.Parameter(lay(full(name, 0), mesh, layouts[name])) for name in names}
    optimizer = MUON.build(parameters, config, meshes_of(rank))
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = lay(full(name, step), mesh, layouts[name])
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    return {name: whole(parameter) for name, parameter in parameters.items()}


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter at full shape."""
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def check(run_ranks: Callable[..., list[Any]], names: Sequence[str], layout: Layout, config: MuonConfig) -> None:
    """Compare what all ranks come to with torch's own in one process."""
    (expected,) = run_ranks(1, reference, names, config)
    _, sizes, _ = layout
    for weights in run_ranks(int(torch.Size(sizes).numel()), train, names, layout, config):
        for name in names:
            error = float((weights[name] - expected[name]).norm())
            assert error <= 1e-5 * float((expected[name] - full(name, 0)).norm()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_any_placement_equals_torch(layout: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Matrices cut in any way, unevenly too, step as torch's Muon steps whole ones, and all else as its AdamW does."""
    check(run_ranks, list(SHAPES), LAYOUTS[layout], CONFIG)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_muon_each_expert_is_a_matrix(layout: str, run_ranks: Callable[..., list[Any]]) -> None:
    """A stack of experts steps as torch's Muon steps each of its matrices, wherever they lie."""
    check(run_ranks, list(EXPERTS), EXPERT_LAYOUTS[layout], CONFIG)


@pytest.mark.parametrize(
    "config",
    [
        MuonConfig(adjust_lr="original"),
        MuonConfig(nesterov=False),
        MuonConfig(momentum=0.0, weight_decay=0.0, iterations=3),
    ],
    ids=["original", "no nesterov", "others"],
)
def test_muon_settings_are_those_of_torch(config: MuonConfig, run_ranks: Callable[..., list[Any]]) -> None:
    """Each setting does what it does in torch's Muon."""
    check(run_ranks, list(SHAPES), LAYOUTS["three tensor ranks, unevenly"], config)


def costs(rank: int, layers: int) -> tuple[int, int]:
    """Take a step over the matrices of some layers; return how many messages were sent and matrices worked on here."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data"))
    parameters = {
        f"language.layers.{layer}.{name}": nn.Parameter(lay(torch.ones(6, 6), mesh, [placement, CUT0]))
        for layer in range(layers)
        for name, placement in (("up", CUT0), ("down", CUT1))
    }
    optimizer = MUON.build(parameters, CONFIG, meshes_of(rank))
    messages, worked, send, work = [], [], dist.all_to_all_single, torch_muon._zeropower_via_newtonschulz

    def sending(*args: Any, **named: Any) -> Any:
        messages.append(args)
        return send(*args, **named)

    def working(*args: Any) -> Tensor:
        worked.append(args)
        return work(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", sending)
        patch.setattr("mimo_optimizer_muon._muon._zeropower_via_newtonschulz", working)
        optimizer.step()
    return len(messages), len(worked)


def test_muon_sends_few_messages_and_shares_the_work(run_ranks: Callable[..., list[Any]]) -> None:
    """One message there and one back along each axis, however many matrices; each of them is worked on once."""
    assert run_ranks(4, costs, 4) == [(4, 2)] * 4
    assert sum(worked for _, worked in run_ranks(4, costs, 1)) == 2


def states(rank: int) -> dict[str, dict[str, list[int]]]:
    """Return the names and shapes of the state before any step, having checked that it lies as the parameters do."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    names = ["language.up.weight", "language.norm.weight"]
    parameters = {name: nn.Parameter(lay(full(name, 0), mesh, TENSOR.get(name, [COPY]))) for name in names}
    optimizer = MUON.build(parameters, CONFIG, meshes_of(rank))
    for parameter in parameters.values():
        assert isinstance(parameter, DTensor)
        for key, value in optimizer.state[parameter].items():
            assert not value.requires_grad
            assert not value.any() if key == "step" else not whole(value).any()
            assert key == "step" or (isinstance(value, DTensor) and value._spec == parameter._spec)
    return {
        name: {key: list(value.shape) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
    }


def test_muon_state_is_there_from_the_start(run_ranks: Callable[..., list[Any]]) -> None:
    """A matrix has a momentum of its own layout, everything else what AdamW keeps."""
    assert run_ranks(2, states) == 2 * [
        {
            "language.up.weight": {"momentum_buffer": [7, 6]},
            "language.norm.weight": {"step": [], "exp_avg": [6], "exp_avg_sq": [6]},
        }
    ]


def missing(rank: int) -> list[bool]:
    """Step with a gradient on rank 0 alone; return whether the matrices are where half of it everywhere leads."""
    found = []
    for given in (True, rank == 0):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parameter = nn.Parameter(lay(torch.eye(4), mesh, [CUT0]))
        optimizer = MUON.build({"language.up": parameter}, CONFIG, meshes_of(rank))
        gradient = torch.zeros(4, 4)
        gradient[:2] = full("language.up.weight", 1)[:2, :4]
        parameter.grad = lay(gradient, mesh, [CUT0]) if given else None
        optimizer.param_groups[0]["lr"] = RATE
        optimizer.step()
        found.append(whole(parameter))
    return [torch.equal(*found), not torch.equal(found[0], torch.eye(4))]


def test_muon_missing_gradients_are_zero(run_ranks: Callable[..., list[Any]]) -> None:
    """A rank without a gradient for its piece still takes part: no other rank waits for ever."""
    assert run_ranks(2, missing) == [[True, True]] * 2


def test_muon_resumes_from_what_was_saved() -> None:
    """Matrices and all else, into the memory that it works on; a learning rate set after it reaches both."""

    def make(values: Mapping[str, Tensor]) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        parameters = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
        optimizer = MUON.build(parameters, CONFIG, None)  # type: ignore[arg-type]  # plain tensors lie on no mesh
        for group in optimizer.param_groups:
            group["lr"] = RATE
        return parameters, optimizer

    def step(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    generator = torch.Generator().manual_seed(0)
    first, before = make({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
    step(first, before, 1)
    second, after = make(first)
    after.load_state_dict(before.state_dict())
    for number in (2, 3):
        step(first, before, number)
        step(second, after, number)
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)
    for group in after.param_groups:
        group["lr"] = 0.0
    step(second, after, 4)
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)
