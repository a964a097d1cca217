"""What the layers of a stage that is spread over lanes may do: return much, run twice, wait for their parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast
from unittest import mock

import attrs
import pytest
import torch
from lanes import EVERYBODY, ROWS, SHARDS, Block, Case, Stage, alone, check_identical, config_of, lay_out, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mimo.hooks import PluginError
from mimo.optimizer import ModuleParameters
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed import DISTRIBUTED
from mimo_optimizer_distributed._fsdp import Group
from mimo_optimizer_distributed.spec import shard
from mimo_optimizer_distributed.units import owned


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
class SavedNames:
    """That in a dataclass."""

    held: Held


class Named(NamedTuple):
    """That by name, and something beside it."""

    rows: Mapping[str, SavedNames]
    number: int


class Structure(Block):
    """A layer whose output is inside of a container."""

    def forward(self, x: Tensor) -> Named:
        return Named({"rows": SavedNames(Held(torch.add(x, torch.tanh(self.inner(x)))))}, len(x))


class Wrapped:
    """What nobody can look into."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Opaque(Block):
    """A layer that returns such."""

    def forward(self, x: Tensor) -> Wrapped:
        return Wrapped(torch.tanh(self.inner(x)))


class OwnWay(Stage):
    """A stage that runs its layers in its own order and way."""

    def __init__(self, *, order: Sequence[int] = (0, 1, 2), layer: type[Block] = Block, way: str = "call") -> None:
        super().__init__(layer=layer)
        self.order, self.way = order, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "always":
            return torch.mul(self.leave(self.run_layers(self.enter(x))), self.scale)
        return super().forward(x)

    def run_layers(self, x: Tensor) -> Tensor:
        if self.way == "two checkpointed":
            x = checkpoint(lambda rows: self.layers[1](self.layers[0](rows)), x, use_reentrant=False)
        for index in self.order[2 if self.way == "two checkpointed" else 0 :]:
            x = self._run(self.layers[index], x)
        return x

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.way == "method":
            return cast("Tensor", type(layer).forward(layer, x))
        if self.way == "checkpointed":
            return cast("Tensor", checkpoint(layer, x, use_reentrant=False))
        found = layer(x)
        if isinstance(found, Named):
            return found.rows["rows"].held.rows
        return found.mul_(0.5) if isinstance(layer, View) else cast("Tensor", found)


def _wrong_order(rank: int, order: Sequence[int]) -> None:
    stage = OwnWay(order=order)
    part, meshes = lay_out(rank, Case(lanes=2, config=config_of("full"), full=()), stage)
    prepared = DISTRIBUTED.prepare(part, meshes, config_of("full"))
    with prepared.on_compute("forward"):
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
    case = Case(lanes=2, config=config_of(shard), full=full, stage=partial(OwnWay, layer=layer, way=way))
    for found in run_ranks(2, run, case):
        check_identical(found, alone(case), 2e-6)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_distributed_a_layer_need_not_be_called_itself(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """What is inside of it waits for what is gathered too."""
    case = Case(lanes=2, config=config_of(shard), full=(EVERYBODY,), stage=partial(OwnWay, way="method"))
    for found in run_ranks(2, run, case):
        check_identical(found, alone(case), 2e-6)


@pytest.mark.parametrize(
    ("stage", "expected", "got"),
    [
        (
            partial(OwnWay, layer=Opaque),
            "layers that return tensors, or tuples, lists, dicts and data classes of them, as optimizer.shard = ",
            "a Opaque that returns a Wrapped",
        ),
        (
            partial(OwnWay, way="two checkpointed"),
            "layers that are computed again one at a time, each when its own gradients come, as optimizer.shard",
            "a Block that is computed again before that",
        ),
    ],
)
def test_distributed_full_refuses_what_it_cannot_follow(
    stage: Callable[[], Stage], expected: str, got: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """Rather than compute with parameters that are not there."""
    case = Case(lanes=2, config=config_of("full"), full=(EVERYBODY,), stage=stage)

    def refused(rank: int) -> str:
        with pytest.raises(PluginError) as error:
            run(rank, case)
        return str(error.value)

    for message in run_ranks(2, refused):
        assert message.startswith(f"modules.vision.plugin: expected {expected}")
        assert message.endswith(f", got {got}. Set optimizer.shard = 'gradients' for this module.")


def _gathered_when_ready(rank: int) -> list[str]:
    """Return what happened, where each layer's parameters are ready when the layer before it has run."""
    config = config_of("optimizer", overlaps=True)
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
        prepared.synchronize("any")
    return events


def test_distributed_layers_run_while_those_behind_them_are_not_there_yet(run_ranks: Callable[..., list[Any]]) -> None:
    """Where parameters come from elsewhere, as from the host; a lane without a sample still gathers."""
    first, other = run_ranks(2, _gathered_when_ready)
    places = ("enter", "layers.0", "layers.1", "layers.2")
    assert first == [f"{place} {what}" for place in places for what in ("is gathered", "has run")]
    assert other == [f"{place} is gathered" for place in places]


class LateStream:
    """What stands in for a device's stream: what it is given is done when somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_error: object) -> None:
        """Do nothing."""

    def record_event(self) -> LateStream:
        """Return what is reached when all is done."""
        return self

    def wait_event(self, event: LateStream) -> None:
        """Come after it."""
        self.given.append(event.wait)

    def wait(self) -> None:
        """Do all."""
        while self.given:
            self.given.pop(0)()


def _gathered_from_elsewhere(_rank: int, precision: str) -> list[float]:
    """Return the weight with which a layer computes whose piece is 1, and becomes 2 on a stream of its own."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    beside, dtype = LateStream(), torch.bfloat16 if precision == "bf16" else torch.float32

    def before() -> None:
        beside.given.append(lambda: group.pieces["weight"].fill_(2))

    group = Group(
        owned([layer], dict(layer.named_parameters())),
        mesh=init_device_mesh("cpu", (1,)),
        sums=lambda _gradients: pytest.fail("nothing is summed"),
        dtype=dtype,
        before=before,
    )
    with (
        ThreadPoolExecutor(1) as executor,
        mock.patch.object(torch.accelerator, "current_stream", return_value=LateStream()),
    ):
        group.gather_when_ready(executor, cast("torch.Stream", beside))
        group.wait()
    return cast("list[float]", layer.weight.flatten().tolist())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_distributed_a_single_lane_reads_pieces_when_they_have_come(
    precision: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """As of several lanes: FSDP2 gathers nothing then, and waits for no stream."""
    assert run_ranks(1, partial(_gathered_from_elsewhere, precision=precision)) == [[2.0, 2.0]]
