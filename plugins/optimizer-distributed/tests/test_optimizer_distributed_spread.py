"""Parameters, gradients and updates of a small stage that is spread over lanes, beside one process."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mimo.hooks import PluginError
from mimo.optimizer import DATA, ModuleParameters, Precision
from mimo.topology import REPLICA, Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed import DISTRIBUTED, DistributedConfig
from mimo_optimizer_distributed._scatter import Scatter
from mimo_optimizer_distributed.sharding import shard

ROWS = (3, 5, 7)
"""Width in, inside and out: no number of lanes divides them."""


class Block(nn.Module):
    """A layer with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(ROWS[1], ROWS[1])

    def forward(self, x: Tensor) -> Any:
        return torch.add(x, torch.tanh(self.inner(x)))


class View(Block):
    """A layer whose output is a view, to which its stage writes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, torch.tanh(self.inner(x))).view(-1, ROWS[1])


class Idle(Block):
    """A layer that returns no rows as they came."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, torch.tanh(self.inner(x))) if len(x) else x


@attrs.frozen
class Held:
    """Rows in a class of attrs."""

    rows: Tensor


@dataclass
class Kept:
    """That in a dataclass."""

    held: Held


class Named(NamedTuple):
    """That by name, and something beside it."""

    rows: Mapping[str, Kept]
    number: int


class Structure(Block):
    """A layer whose output stands inside of something."""

    def forward(self, x: Tensor) -> Named:
        return Named({"rows": Kept(Held(torch.add(x, torch.tanh(self.inner(x)))))}, len(x))


class Wrapped:
    """What nobody can look into."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Opaque(Block):
    """A layer that returns such."""

    def forward(self, x: Tensor) -> Wrapped:
        return Wrapped(torch.tanh(self.inner(x)))


class Stage(nn.Module):
    """A stranger's module: where it gets no rows it runs no layer, and what it returns has no graph."""

    def __init__(self, *, order: Sequence[int] = (0, 1, 2), layer: type[Block] = Block, way: str = "call") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(ROWS[0], ROWS[1])
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.way = way
        self.leave = nn.Linear(ROWS[1], ROWS[2])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if not len(x) and self.way != "always":
            return x.new_zeros(0, ROWS[2])
        x = self.enter(x)
        if self.way == "two checkpointed":
            x = checkpoint(lambda rows: self.layers[1](self.layers[0](rows)), x, use_reentrant=False)
        for index in self.order[2 if self.way == "two checkpointed" else 0 :]:
            x = self._run(self.layers[index], x)
        return torch.mul(self.leave(x), self.scale)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.way == "method":
            return cast("Tensor", type(layer).forward(layer, x))
        if self.way == "checkpointed":
            return cast("Tensor", checkpoint(layer, x, use_reentrant=False))
        found = layer(x)
        if isinstance(found, Named):
            return found.rows["rows"].held.rows
        return found.mul_(0.5) if isinstance(layer, View) else cast("Tensor", found)


def rows_of(lane: int, microbatch: int) -> Tensor:
    """Return what a lane reads."""
    return torch.randn(2, ROWS[0], generator=torch.Generator().manual_seed(7 * lane + microbatch))


@attrs.frozen(kw_only=True)
class Case:
    """Which lanes have rows in which microbatch, and how the stage is spread over them."""

    lanes: int
    config: DistributedConfig
    full: Sequence[frozenset[int]]
    precision: Precision = "fp32"
    frozen: str = ""
    stage: Callable[[], Stage] = Stage


def _lay_out(rank: int, case: Case, stage: nn.Module) -> tuple[ModuleParameters, Meshes]:
    grid = Grid(name="vision", ranks=range(case.lanes), dp=case.lanes)
    module = Module(
        grid=grid,
        trains=(True,),
        gathers=DISTRIBUTED.rendezvous(case.config),
        shard_lanes=DISTRIBUTED.shard_lanes(case.config),
        overlaps=DISTRIBUTED.overlaps(case.config),
    )
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    named = {f"vision.{path}": value for path, value in stage.named_parameters()}
    for name, value in named.items():
        value.requires_grad_(not (case.frozen and case.frozen in name))
    part = ModuleParameters(
        grid=grid,
        rank=rank,
        parameters={name: value for name, value in named.items() if value.requires_grad},
        frozen={name: value for name, value in named.items() if not value.requires_grad},
        modules=(stage,),
        precision=case.precision,
    )
    return part, meshes


def _run(rank: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """Return gradients and weights after each of two steps, at full shape."""
    stage = case.stage()
    part, meshes = _lay_out(rank, case, stage)
    prepared = DISTRIBUTED.prepare(part, meshes, case.config)
    pieces = {**part.parameters, **(prepared.parameters or {})}
    assert list(prepared.parameters or {}) == [name for name in part.parameters if name != "vision.scale"]
    optimizer = DISTRIBUTED.build(pieces, case.config, meshes)
    optimizer.param_groups[0]["lr"] = 0.1
    found = {}
    for step in (1, 2):
        for piece in pieces.values():
            piece.grad = None
        prepared.gather(ThreadPoolExecutor(1))
        for microbatch, filled in enumerate(case.full):
            x = rows_of(rank, microbatch) if rank in filled else torch.zeros(0, ROWS[0])
            x = x.to({"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision])
            with prepared.computing("forward"):
                y = stage(x)
            last = microbatch == len(case.full) - 1
            with prepared.adding(None, last), prepared.computing("backward"):
                if y.requires_grad:
                    (y.float().square().sum() / y.shape[1]).backward()
        prepared.reduce()
        found[f"gradients {step}"] = {name: _full(piece.grad) for name, piece in pieces.items()}
        prepared.settle("any")
        optimizer.step()
        found[f"weights {step}"] = {name: _full(piece) for name, piece in pieces.items()}
    return found


def _full(value: Tensor | None) -> Tensor:
    assert value is not None
    assert value.dtype == torch.float32
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _alone(case: Case) -> dict[str, dict[str, Tensor]]:
    """Return the same of one process without any plugin."""
    stage = case.stage()
    named = {f"vision.{path}": value for path, value in stage.named_parameters()}
    trained = {name: value for name, value in named.items() if not (case.frozen and case.frozen in name)}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=0.1, betas=case.config.betas, eps=case.config.eps, weight_decay=case.config.weight_decay
    )
    x = torch.cat(
        [
            rows_of(lane, microbatch)
            for microbatch, filled in enumerate(case.full)
            for lane in range(case.lanes)
            if lane in filled
        ]
    )
    found = {}
    for step in (1, 2):
        optimizer.zero_grad()
        (stage(x).square().sum() / ROWS[2]).backward()
        found[f"gradients {step}"] = {name: _full(value.grad) for name, value in trained.items()}
        optimizer.step()
        found[f"weights {step}"] = {name: _full(value) for name, value in trained.items()}
    return found


SHARDS = ("optimizer", "gradients", "full")
EVERYBODY = frozenset(range(4))


def _config(shard: Any, shard_lanes: int = 0, *, overlaps: bool = False) -> DistributedConfig:
    return DistributedConfig(
        shard=shard,
        shard_lanes=shard_lanes,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        eps=1e-4,
    )


def _agree(found: Mapping[str, Mapping[str, Tensor]], true: Mapping[str, Mapping[str, Tensor]], rtol: float) -> None:
    assert found.keys() == true.keys()
    for what, values in true.items():
        for name, value in values.items():
            torch.testing.assert_close({name: found[what][name]}, {name: value}, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    ("lanes", "shard_lanes", "full"),
    [
        (2, 0, (EVERYBODY, EVERYBODY)),
        (3, 0, (EVERYBODY, frozenset({1}))),
        (3, 0, (frozenset({0, 2}), frozenset({0}))),
        (4, 2, (EVERYBODY, frozenset({3}))),
    ],
)
def test_distributed_steps_are_those_of_one_process(
    shard: str, lanes: int, shard_lanes: int, full: Any, *, overlaps: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Lanes that run no layer take part, in the last microbatch too; pieces are uneven, and some are empty."""
    case = Case(lanes=lanes, config=_config(shard, shard_lanes, overlaps=overlaps), full=full)
    found = run_ranks(lanes, _run, case)
    (true,) = run_ranks(1, lambda _rank: _alone(case))
    for outcome in found:
        _agree(outcome, true, 1e-5)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("shard", "lanes", "shard_lanes"),
    [*((shard, lanes, 0) for shard in SHARDS for lanes in (1, 2)), ("optimizer", 2, 1)],
)
def test_distributed_layers_compute_in_bf16_and_masters_stay_fp32(
    shard: str, lanes: int, shard_lanes: int, *, overlaps: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Also where nothing is spread, on one lane or in copies: gradients of all microbatches add up in fp32."""
    case = Case(
        lanes=lanes,
        config=_config(shard, shard_lanes, overlaps=overlaps),
        full=(EVERYBODY, EVERYBODY, frozenset({0})),
        precision="bf16",
    )
    found = run_ranks(lanes, _run, case)
    (true,) = run_ranks(1, lambda _rank: _alone(case))
    for outcome in found:
        _agree({"gradients 1": outcome["gradients 1"]}, {"gradients 1": true["gradients 1"]}, 0.05)


@pytest.mark.parametrize("shard", SHARDS)
def test_distributed_frozen_parameters_are_spread_too(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """They have no gradient, and those of the others are what they would be."""
    case = Case(lanes=2, config=_config(shard), full=(EVERYBODY,), frozen="layers.1")
    found = run_ranks(2, _run, case)
    (true,) = run_ranks(1, lambda _rank: _alone(case))
    for outcome in found:
        _agree(outcome, true, 1e-5)


def _pieces(rank: int, case: Case) -> dict[str, Any]:
    stage = Stage()
    whole = copy.deepcopy(stage).state_dict()
    part, meshes = _lay_out(rank, case, stage)
    prepared = DISTRIBUTED.prepare(part, meshes, case.config)
    assert prepared.parameters is not None
    weight = prepared.parameters["vision.leave.weight"]
    assert isinstance(weight, DTensor)
    held: dict[str, Any] = {"names": weight.device_mesh.mesh_dim_names, "rows": weight.to_local().tolist()}
    stage.leave.register_forward_hook(
        lambda leave, _given, _output: held.update(inside=bool((leave.weight == whole["leave.weight"]).all()))
    )
    prepared.gather(ThreadPoolExecutor(1))
    with prepared.computing("forward"):
        stage(torch.zeros(1, 3))
    prepared.settle("any")
    after = stage.leave.weight
    assert isinstance(after, DTensor)
    held["after"] = tuple(after.to_local().shape)
    return held


@pytest.mark.parametrize("shard", SHARDS)
def test_distributed_pieces_are_those_of_chunk(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Seven rows over two of four lanes are four and three, twice; settling gives back what was gathered."""
    found = run_ranks(4, _pieces, Case(lanes=4, config=_config(shard, 2), full=()))
    rows = Stage().leave.weight.tolist()
    assert [held["rows"] for held in found] == [rows[:4], rows[4:]] * 2
    assert found[0]["names"] == (REPLICA, "tp", DATA)
    assert all(held["inside"] for held in found)
    assert [held["after"] for held in found] == [(4, 5), (3, 5)] * 2


def _wrong_order(rank: int, order: Sequence[int]) -> None:
    stage = Stage(order=order)
    part, meshes = _lay_out(rank, Case(lanes=2, config=_config("full"), full=()), stage)
    prepared = DISTRIBUTED.prepare(part, meshes, _config("full"))
    with prepared.computing("forward"):
        stage(torch.zeros(1, 3))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 1, 2)])
def test_distributed_full_refuses_layers_in_another_order(
    order: Sequence[int], run_ranks: Callable[..., list[Any]]
) -> None:
    """Another lane might run them in another order still, and would wait for other layers than this one."""

    def refused(rank: int) -> str:
        with pytest.raises(PluginError) as error:
            _wrong_order(rank, order)
        return str(error.value)

    for text in run_ranks(2, refused):
        assert text == (
            "modules.vision.plugin: expected layers that each run once in a forward, in the order in which they stand "
            "in their list, as optimizer.shard = 'full' gathers them in that order, got a Block again, or after one "
            "that stands behind it. Set optimizer.shard = 'gradients' for this module."
        )


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    ("layer", "way"), [(View, "call"), (Structure, "call"), (Idle, "always"), (Block, "checkpointed")]
)
def test_distributed_layers_may_return_much_and_be_computed_again(
    shard: str, layer: type[Block], way: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """Views, to which their stage may write, structures, and what they were given."""
    full = (EVERYBODY, frozenset({0}))
    case = Case(lanes=2, config=_config(shard), full=full, stage=partial(Stage, layer=layer, way=way))
    for found in run_ranks(2, _run, case):
        _agree(found, _alone(case), 2e-6)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_distributed_a_layer_need_not_be_called_itself(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """What is inside of it waits for what is gathered too."""
    case = Case(lanes=2, config=_config(shard), full=(EVERYBODY,), stage=partial(Stage, way="method"))
    for found in run_ranks(2, _run, case):
        _agree(found, _alone(case), 2e-6)


@pytest.mark.parametrize(
    ("stage", "expected", "got"),
    [
        (
            partial(Stage, layer=Opaque),
            "layers that return tensors, or tuples, lists, dicts and data classes of them, as optimizer.shard = ",
            "a Opaque that returns a Wrapped",
        ),
        (
            partial(Stage, way="two checkpointed"),
            "layers that are computed again one at a time, each when its own gradients come, as optimizer.shard",
            "a Block that is computed again before that",
        ),
    ],
)
def test_distributed_full_refuses_what_it_cannot_follow(
    stage: Callable[[], Stage], expected: str, got: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """Rather than compute with parameters that are not there."""
    case = Case(lanes=2, config=_config("full"), full=(EVERYBODY,), stage=stage)

    def refused(rank: int) -> str:
        with pytest.raises(PluginError) as error:
            _run(rank, case)
        return str(error.value)

    for told in run_ranks(2, refused):
        assert told.startswith(f"modules.vision.plugin: expected {expected}")
        assert told.endswith(f", got {got}. Set optimizer.shard = 'gradients' for this module.")


def _sums(_rank: int) -> list[Tensor]:
    """Return the gradients that two microbatches add one by one, and both before what was put off is added."""
    stage, config = Stage(), _config("optimizer")
    part, meshes = _lay_out(0, Case(lanes=1, config=config, full=(), precision="bf16"), stage)
    prepared = DISTRIBUTED.prepare(part, meshes, config)
    found = []
    for microbatches in ((0,), (1,), (0, 1)):
        prepared.gather(ThreadPoolExecutor(1))
        for microbatch in microbatches:
            with prepared.computing("forward"):
                y = stage(rows_of(0, microbatch).bfloat16())
            with prepared.computing("backward"):
                y.float().square().sum().backward()
        prepared.reduce()
        found.append(torch.cat([_full(piece.grad).flatten() for piece in (prepared.parameters or {}).values()]))
        for piece in (prepared.parameters or {}).values():
            piece.grad = None
        prepared.settle("any")
    return found


def test_distributed_gradients_of_microbatches_are_added_in_fp32(run_ranks: Callable[..., list[Any]]) -> None:
    """Those too that are there before the backward's weight gradients, which a schedule may put off."""
    ((one, other, both),) = run_ranks(1, _sums)
    assert not torch.equal(one + other, (one + other).bfloat16().float())
    assert torch.equal(both, one + other)


def _gathered_when_ready(rank: int) -> list[str]:
    """Return what happened, where each layer's parameters are ready when the layer before it has run."""
    config = _config("optimizer", overlaps=True)
    stage, events = Stage(), list[str]()
    ready = {name: threading.Event() for name in ("enter", "layers.0", "layers.1", "layers.2")}
    grid = Grid(name="vision", ranks=range(2), dp=2)
    module = Module(grid=grid, trains=(True,), shard_lanes=0, overlaps=frozenset({"gathers"}))
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    named = {f"vision.{path}": value for path, value in stage.named_parameters()}
    part = ModuleParameters(grid=grid, rank=rank, parameters=named, modules=(stage,))

    def before(names: Collection[str]) -> None:
        for place, event in ready.items():
            if any(name.startswith(f"vision.{place}.") for name in names):
                assert event.wait(20), place
                events.append(f"{place} is gathered")

    prepared = shard(part, meshes, config, before_gather=before, gathers_when_ready=True)
    places = list(ready)
    for place, following in zip(places, [*places[1:], None], strict=True):

        def ran(_module: nn.Module, _given: Any, _output: Any, here: str = place, then: str | None = following) -> None:
            events.append(f"{here} has run")
            if then is not None:
                ready[then].set()

        stage.get_submodule(place).register_forward_hook(ran)
    with ThreadPoolExecutor(1) as executor:
        prepared.gather(executor)
        ready["enter"].set()
        if rank == 0:
            stage(torch.zeros(1, 3))
        else:
            for event in ready.values():
                event.set()
        prepared.settle("any")
    return events


def test_distributed_layers_run_while_those_behind_them_are_not_there_yet(run_ranks: Callable[..., list[Any]]) -> None:
    """Where parameters come from elsewhere, as from the host; a lane without a sample gathers all the same."""
    first, other = run_ranks(2, _gathered_when_ready)
    places = ("enter", "layers.0", "layers.1", "layers.2")
    assert first == [f"{place} {what}" for place in places for what in ("is gathered", "has run")]
    assert other == [f"{place} is gathered" for place in places]


def _run_in_disorder(rank: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """Do so where sums come back in another order on each rank."""
    chance = random.Random(rank)
    Scatter.is_done = property(lambda _sum: chance.random() < 0.3)  # type: ignore[assignment, method-assign]
    return _run(rank, case)


def test_distributed_sums_may_come_back_in_any_order(run_ranks: Callable[..., list[Any]]) -> None:
    """What is then summed over copies is of the same parameters on all of them."""
    case = Case(lanes=4, config=_config("optimizer", 2, overlaps=True), full=(EVERYBODY, EVERYBODY))
    found = run_ranks(4, _run_in_disorder, case)
    (true,) = run_ranks(1, lambda _rank: _alone(case))
    for outcome in found:
        _agree(outcome, true, 1e-5)
