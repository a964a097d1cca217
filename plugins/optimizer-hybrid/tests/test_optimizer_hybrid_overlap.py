"""What runs while the thread steps: layers wait for their own parameters, readers for all, and errors are raised."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.hooks import RunError
from mimo.optimizer import ModuleParameters, Prepared, Share
from mimo.optimizer.runtime import LocalAdamW
from mimo.topology import Grid
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig
from mimo_optimizer_hybrid._agreement import agree
from mimo_optimizer_hybrid._host_half import HostHalf
from mimo_optimizer_hybrid._readers import Readers
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

SECONDS = 20
"""After which a test that waits in vain fails."""
LAYERS, WIDTH = 4, 16
BUCKETS = 1 + 2 * LAYERS + 1
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Model(nn.Module):
    """Layers in a list, one that is used without being called, and two parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.uncalled = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return a number for each row."""
        rows = rows * self.scale
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        (uncalled,) = self.uncalled
        assert isinstance(uncalled, nn.Linear)
        return self.head(rows @ uncalled.weight)  # type: ignore[no-any-return]


@attrs.define
class Gate:
    """Lets the thread finish a given number of buckets; it waits before it finishes another."""

    finish: Callable[..., Any]
    free: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    error: Exception | None = None

    def open(self, buckets: int) -> None:
        """Let some more pass."""
        self.free.release(buckets)

    def passes(self, *args: Any) -> Any:
        """Finish a bucket, in its turn."""
        if not self.free.acquire(timeout=SECONDS):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.finish(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is closed at first, and open in the end."""
    found = Gate(HostHalf._finish)
    monkeypatch.setattr(HostHalf, "_finish", lambda *args: found.passes(*args))  # noqa: PLW0108  # a function becomes a method
    yield found
    found.open(1000)


@attrs.frozen
class Setup:
    """A model, how its parameters are prepared, and their optimizer."""

    model: Model
    prepared: Prepared
    optimizer: HybridDeviceOptimizer


def prepare(part: ModuleParameters) -> Prepared:
    """Return how parameters lie, with gradients that are final as soon as they are reduced."""
    readers = Readers(part)
    return readers.prepared(Prepared(lambda: readers.reduced(part.parameters)))


def build(part: ModuleParameters, *prepared: Prepared) -> HybridDeviceOptimizer:
    """Return what steps the parameters of a part."""
    config = CpuOffloadConfig(bucket_bytes=192, **SETTINGS)
    (agreed,) = agree([Share(part=part, config=config, prepared=prepared)], torch.device("cpu"))
    optimizer = HYBRID.build(part.parameters, agreed, None)  # type: ignore[arg-type]  # it needs no groups
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert optimizer.overlaps
    return optimizer


def make(*, frozen: bool = False) -> Setup:
    """Return a model, all of whose state the host holds; ``frozen`` is its layer that is never called.

    The first bucket holds parameters of no layer, and each parameter of a layer is a bucket.
    """
    torch.manual_seed(1)
    model = Model()
    model.uncalled.requires_grad_(not frozen)
    parameters = {f"model.{name}": value for name, value in model.named_parameters() if value.requires_grad}
    part = ModuleParameters(grid=Grid(name="model", ranks=(0,)), rank=0, parameters=parameters, modules=(model,))
    prepared = prepare(part)
    optimizer = build(part, prepared)
    optimizer.param_groups[0]["lr"] = 0.1
    return Setup(model, prepared, optimizer)


def loss(model: Model, step: int) -> Tensor:
    """Return the loss of a step's rows."""
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(5, WIDTH, generator=generator)).square().sum()  # type: ignore[no-any-return]


def backward(setup: Setup, step: int) -> Tensor:
    """Leave the gradients of a step where `Prepared.reduce` does."""
    found = loss(setup.model, step)
    setup.optimizer.zero_grad()
    found.backward()
    setup.prepared.reduce()
    return found.detach()


def plain_losses(steps: int, *, frozen: bool = False) -> list[Tensor]:
    """Return the losses of a plain loop."""
    torch.manual_seed(1)
    model, found = Model(), list[Tensor]()
    model.uncalled.requires_grad_(not frozen)
    optimizer = LocalAdamW(model.parameters(), lr=0.1, **SETTINGS)
    for step in range(steps):
        found.append(loss(model, step))
        optimizer.zero_grad()
        found[-1].backward()
        optimizer.step()
    return [one.detach() for one in found]


def test_what_a_forward_needs_first_is_stepped_first() -> None:
    """Parameters of no layer, then layer by layer."""
    optimizer = make().optimizer
    order = [name.removeprefix("model.") for name in optimizer._index]
    layers = [f"layers.{index}.{leaf}" for index in range(LAYERS) for leaf in ("weight", "bias")]
    assert order == ["scale", "head.weight", "head.bias", *layers, "uncalled.0.weight"]
    assert len(optimizer._host._done) == BUCKETS


def test_overlapping_steps_equal_a_plain_loop_to_the_bit() -> None:
    """Whatever the thread has done by the time of the next forward."""
    setup = make()
    losses = []
    for step in range(6):
        losses.append(backward(setup, step))
        setup.prepared.synchronize("step")
        setup.optimizer.step()
    setup.optimizer.wait_all()  # a gate of the next test would hold up its thread, too
    assert all(map(torch.equal, losses, plain_losses(6)))


def test_masters_are_read_anew_only_where_others_may_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a step, of however many stages."""
    parts: list[tuple[Model, ModuleParameters, Prepared]] = []
    for name in ("first", "second"):
        torch.manual_seed(1)
        model = Model()
        parameters = {f"{name}.{path}": value for path, value in model.named_parameters()}
        part = ModuleParameters(grid=Grid(name=name, ranks=(0,)), rank=0, parameters=parameters, modules=(model,))
        parts.append((model, part, prepare(part)))
    both = {name: value for _, part, _ in parts for name, value in part.parameters.items()}
    optimizer = build(attrs.evolve(parts[0][1], parameters=both), *(prepared for _, _, prepared in parts))
    calls = list[str]()
    monkeypatch.setattr(optimizer, "distrust", lambda: calls.append("distrust"))
    for step in range(2):
        optimizer.zero_grad()
        torch.stack([loss(model, step) for model, _, _ in parts]).sum().backward()
        for _, _, prepared in parts:
            prepared.reduce()
        for _, _, prepared in parts:
            prepared.synchronize("step")
        optimizer.step()
    assert not calls
    parts[1][2].synchronize("any")
    assert calls == ["distrust"]
    optimizer.wait_all()


def test_a_layer_waits_for_its_own_parameters_only(gate: Gate) -> None:
    """Each opens the gate for the one behind it: if one waited for more than its own, nobody would."""
    setup = make(frozen=True)
    losses = [backward(setup, 0)]
    setup.optimizer.step()
    for layer in setup.model.layers:
        layer.register_forward_hook(lambda *_: gate.open(2))
    gate.open(1 + 2)
    losses.append(backward(setup, 1))
    assert all(map(torch.equal, losses, plain_losses(2, frozen=True)))


def test_what_no_forward_has_called_is_waited_for_before_all(gate: Gate) -> None:
    """A stage may use the parameters of such a layer without calling it, so that it can't wait itself."""
    setup = make()
    backward(setup, 0)
    setup.optimizer.step()
    ran = threading.Event()
    setup.model.layers[0].register_forward_pre_hook(lambda *_: ran.set())
    forward = threading.Thread(target=loss, args=(setup.model, 1))
    forward.start()
    gate.open(BUCKETS - 1)
    assert not ran.wait(0.1)
    gate.open(1)
    assert ran.wait(SECONDS)
    forward.join(SECONDS)


@pytest.mark.parametrize("wait", ["synchronize", "wait_all", "state_dict", "step"])
def test_readers_of_all_wait_for_all(wait: str, gate: Gate) -> None:
    """So do the next step, saving and loading."""
    setup = make()
    backward(setup, 0)
    setup.optimizer.step()
    for parameter in setup.model.parameters():
        parameter.grad = None
    waiting = threading.Thread(target=getattr(setup.optimizer, wait))
    waiting.start()
    assert waiting.is_alive()
    gate.open(BUCKETS)
    waiting.join(SECONDS)
    assert setup.optimizer.is_idle


@pytest.mark.parametrize("call", ["layer", "synchronize", "reduce", "step", "wait_all"])
def test_an_error_of_the_thread_reaches_whoever_calls_next(call: str, gate: Gate) -> None:
    """It is raised again by every further call, as weights are then of two steps."""
    setup = make()
    backward(setup, 0)
    gate.error = MemoryError("no more of it")
    setup.optimizer.step()
    gate.open(BUCKETS)
    calls: dict[str, Callable[[], object]] = {
        "layer": lambda: loss(setup.model, 1),
        "synchronize": lambda: setup.prepared.synchronize("step"),
        "reduce": setup.prepared.reduce,
        "step": setup.optimizer.step,
        "wait_all": setup.optimizer.wait_all,
    }
    for _ in range(2):
        with pytest.raises(RunError) as error:
            calls[call]()
        assert str(error.value) == (
            "optimizer.plugin: expected the thread that steps what the host holds to finish, "
            "got MemoryError('no more of it'). "
            "Some weights have been stepped and others not: go on from the last checkpoint."
        )
        assert error.value.__cause__ is gate.error


def test_an_error_is_raised_by_the_step_itself_where_nothing_overlaps(gate: Gate) -> None:
    """As any optimizer does."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    gate.error = MemoryError("no more of it")
    gate.open(1)
    with pytest.raises(RunError, match="no more of it"):
        HybridDeviceOptimizer({"weight": parameter}).step()


EXITS = """
import threading
import torch
from torch import nn
from mimo.optimizer.runtime import fused_adamw
from mimo_optimizer_hybrid import _host_half
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

begun, ends = threading.Event(), threading.Event()

def step(*args):
    begun.set()
    ends.wait()
    fused_adamw(*args)
    print("stepped", flush=True)

_host_half.fused_adamw = step
parameters = {str(at): nn.Parameter(torch.zeros(100_000)) for at in range(5)}
for parameter in parameters.values():
    parameter.grad = torch.ones(100_000)
optimizer = HybridDeviceOptimizer(parameters, bucket_bytes=100_000, overlaps=True)
optimizer.step()
begun.wait()
ends.set()
"""


@pytest.mark.parametrize(
    "end",
    [*(pytest.param(one, marks=pytest.mark.soak) for one in ("", "raise SystemExit(3)")), "raise KeyboardInterrupt"],
)
def test_exit_while_a_step_runs_lets_it_end(end: str) -> None:
    """Nothing hangs, whatever ends the program; the step comes to its end."""
    code = [sys.executable, "-c", EXITS + end]
    done = subprocess.run(  # noqa: S603  # ours
        code, capture_output=True, text=True, check=False, timeout=10 * SECONDS
    )
    assert done.stdout.splitlines() == ["stepped"] * 35
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, -2), done.stderr


def test_an_optimizer_that_is_dropped_leaves_no_thread() -> None:
    """Its thread ends with it."""
    setup = make()
    backward(setup, 0)
    setup.optimizer.step()
    (thread,) = setup.optimizer._host._thread._threads
    setup.optimizer.wait_all()
    del setup
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()
