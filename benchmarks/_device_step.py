"""A training step with the optimizer's state on the host, wholly or in part, beside all of it on the device.

One process and one device, a decoder of a billion parameters in fp32 whose layers compute in bfloat16 by autocast. Ours
goes the way of training: the plugin's `prepare`, which makes layers wait for their own parameters, its `build`, and
`MimoOptimizer`, which agrees, clips and steps. With *overlap* layers of the next step run while the host still steps.
Beside it the same model and loop with torch's fused AdamW on the device, and with torchao's offload optimizer if it is
installed here, both without clipping. Each is made anew in every round, in turn; seconds are those of a step among
several in a row, bytes the most that the device has held.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from _found import Found
from _plain import DecoderBlock
from torch import Tensor, nn
from torch.nn import functional

from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

WARM_UP, STEPS = 2, 8
RATE = LearningRate(lr=1e-4)
GRID = Grid(name="language", ranks=(0,))
FRACTIONS = (0.0, 0.5, 1.0)
NAMES = {"overlap": True, "no overlap": False}
PLAIN, TORCHAO = "fused AdamW on the device", "torchao"


@attrs.frozen(kw_only=True)
class Size:
    """Of the decoder and of a batch."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    samples: int
    tokens: int
    norm_eps: float = 1e-5

    @property
    def head_width(self) -> int:
        """Of a query, key or value."""
        return self.hidden // self.heads


SIZES = {
    "1B": Size(
        layers=20,
        hidden=2048,
        heads=16,
        key_value_heads=16,
        intermediate=5632,
        vocabulary=32000,
        samples=8,
        tokens=1024,
    ),
    "tiny": Size(
        layers=4, hidden=256, heads=4, key_value_heads=2, intermediate=704, vocabulary=512, samples=2, tokens=64
    ),
}


class Decoder(nn.Module):
    """A decoder; the loss of its own input, one token on, summed."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=size.norm_eps)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss, summed, of ``tokens`` [B, T + 1]."""
        width = self.size.head_width
        frequencies = 10000 ** -(torch.arange(0, width, 2, device=tokens.device) / width)
        angles = torch.arange(tokens.shape[1] - 1, device=tokens.device)[:, None] * frequencies
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")


Step: TypeAlias = Callable[[int], None]


@attrs.frozen(kw_only=True)
class Made:
    """A model and its optimizer: what takes a step, and what waits until all of it is done."""

    step: Step
    finish: Callable[[], None]


@attrs.frozen(kw_only=True)
class Cost:
    """Of one step: seconds, and bytes of the device at most, None where they are not measured."""

    seconds: float
    bytes: int | None


@attrs.frozen(kw_only=True)
class Bench:
    """What the ways have in common."""

    size: Size
    device: torch.device

    def model(self) -> Decoder:
        """Return a new one, always the same."""
        torch.manual_seed(0)
        with self.device:
            return Decoder(self.size)

    def loss(self, model: Decoder, number: int) -> Tensor:
        """Return the loss of the batch of a step."""
        draw = torch.Generator(self.device).manual_seed(number)
        shape = (self.size.samples, self.size.tokens + 1)
        tokens = torch.randint(self.size.vocabulary, shape, generator=draw, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: Tensor = model(tokens)
        return loss

    def ours(self, fraction: float, *, overlap: bool) -> Made:
        """Make `hybrid` as training does."""
        graph = ModuleGraph(modules=(Module(grid=GRID, trains=(True,)),), arrows=())
        meshes = Meshes(graph, rank=0, device_type=self.device.type)
        model = self.model()
        part = ModuleParameters(
            grid=GRID,
            rank=0,
            parameters={f"{GRID.name}.{name}": parameter for name, parameter in model.named_parameters()},
            modules=(model,),
        )
        module = ModuleOptimizer.build(
            {0: part},
            spec=HYBRID,
            config=CpuOffloadConfig(fraction=fraction, overlap=overlap),
            learning_rate=RATE,
            meshes=meshes,
        )
        optimizer = MimoOptimizer(
            [module], names=[GRID.name], learning_rate=RATE, clip=1.0, meshes=meshes, device=self.device
        )
        labels = self.size.samples * self.size.tokens

        def step(number: int) -> None:
            optimizer.zero_gradients()
            optimizer.gather()
            with optimizer.on_compute(GRID.name, 0, "forward"):
                loss = self.loss(model, number)
            with (
                optimizer.on_compute(GRID.name, 0, "backward"),
                optimizer.on_grad_accumulation(GRID.name, 0, None, last=True),
            ):
                loss.backward()
            optimizer.reduce(GRID.name, 0)
            stepped = optimizer.step(
                number, LocalStats(loss=float(loss.detach()), label_weight=labels, rows={GRID.name: labels})
            )
            assert not stepped.skipped

        def finish() -> None:
            for stepper in module.steppers:
                assert isinstance(stepper.optimizer, HybridDeviceOptimizer)
                stepper.optimizer.wait_all()

        return Made(step=step, finish=finish)

    def plain(self) -> Made:
        """Make torch's optimizer on the device."""
        model = self.model()
        return self._loop(model, torch.optim.AdamW(model.parameters(), lr=RATE.lr, betas=(0.9, 0.95), fused=True))

    def torchao(self) -> Made:
        """Make torchao's, which holds all state on the host, and steps each parameter there once its gradient has come.

        Raises:
            Exception: it is not installed, or refuses this device.
        """
        model = self.model()
        optim: Any = importlib.import_module("torchao.optim")
        return self._loop(model, optim.CPUOffloadOptimizer(model.parameters(), lr=RATE.lr, betas=(0.9, 0.95)))

    def _loop(self, model: Decoder, optimizer: torch.optim.Optimizer) -> Made:
        labels = self.size.samples * self.size.tokens

        def step(number: int) -> None:
            optimizer.zero_grad()
            loss = self.loss(model, number) / labels
            loss.backward()
            float(loss.detach())  # as ours reads it too
            optimizer.step()

        return Made(step=step, finish=lambda: None)

    def cost(self, make: Callable[[], Made]) -> Cost:
        """Make a model and its optimizer, and let it take steps."""
        counted = self.device.type != "cpu"
        gc.collect()
        if counted:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)
        made = make()
        for number in range(1, WARM_UP + 1):
            made.step(number)
        self._finish(made)
        began = time.perf_counter()
        for number in range(WARM_UP + 1, WARM_UP + STEPS + 1):
            made.step(number)
        self._finish(made)
        seconds = (time.perf_counter() - began) / STEPS
        return Cost(seconds=seconds, bytes=torch.accelerator.max_memory_allocated(self.device) if counted else None)

    def _finish(self, made: Made) -> None:
        made.finish()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(rounds: int, *, device: torch.device | None, size: str) -> Found:
    """Return what overlap, offload and torchao's way cost and save, a round each.

    Args:
        rounds: how often each way has its turn.
        device: None where there is none worth measuring.
        size: a key of `SIZES`.
    """
    what = f"step of a {size} model"
    names = {
        **{f"{what}, fraction {one:g}, without overlap / with": (">", 1.0) for one in FRACTIONS if one},
        f"{what}, torchao / fraction 1 with overlap": (">=", 1.0),
    }
    if device is None:
        return Found(aims=names, absent=dict.fromkeys(names, "no accelerator here"))
    bench = Bench(size=SIZES[size], device=device)
    ways: dict[str, Callable[[], Made]] = {PLAIN: bench.plain}
    for fraction in FRACTIONS:
        for name, overlap in NAMES.items() if fraction else [("overlap", True)]:
            ways[_way(fraction, name)] = partial(bench.ours, fraction, overlap=overlap)
    absent: dict[str, str] = {}
    try:
        bench.torchao()
        ways[TORCHAO] = bench.torchao
    except Exception as error:  # noqa: BLE001  # it asserts, and an import may fail in many ways
        absent[f"{what}, torchao / fraction 1 with overlap"] = f"torchao: {type(error).__name__}: {error}"
    bench.cost(bench.plain)  # kernels are chosen, and memory is taken, the first time
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        costs = {way: bench.cost(make) for way, make in ways.items()}
        for way, cost in costs.items():
            memory = "" if cost.bytes is None else f", {cost.bytes / 2**30:.2f} GiB at most"
            print(f"{size} on {device}, {way}: {cost.seconds * 1e3:.1f} ms{memory}")
        for name, ratio in _ratios(what, costs).items():
            ratios.setdefault(name, []).append(ratio)
    # On the CPU there is nothing beside which the host could step.
    return Found(ratios=ratios, aims={} if device.type == "cpu" else names, absent=absent)


def _way(fraction: float, name: str) -> str:
    return f"fraction {fraction:g}, {name}"


def _ratios(what: str, costs: Mapping[str, Cost]) -> dict[str, float]:
    """Return how the ways compare, in seconds, and in bytes where the device measures them."""
    own = {fraction: costs[_way(fraction, "overlap")] for fraction in FRACTIONS}
    plain = costs[PLAIN]
    found = {
        f"{what}, fraction {fraction:g}, without overlap / with": costs[_way(fraction, "no overlap")].seconds
        / own[fraction].seconds
        for fraction in FRACTIONS
        if fraction
    }
    found |= {
        f"{what}, fraction {fraction:g} with overlap / fused AdamW on the device": one.seconds / plain.seconds
        for fraction, one in own.items()
    }
    compared = {f"fraction {fraction:g}": one for fraction, one in own.items()}
    if TORCHAO in costs:
        compared[TORCHAO] = costs[TORCHAO]
        found[f"{what}, torchao / fraction 1 with overlap"] = costs[TORCHAO].seconds / own[1.0].seconds
    return found | {
        f"bytes of the device, {way} / fused AdamW on the device": one.bytes / plain.bytes
        for way, one in compared.items()
        if one.bytes is not None and plain.bytes is not None
    }
