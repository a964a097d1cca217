"""CPU seconds of a training step of a deep narrow model, whose time is the host's: over plain loops without us.

48 layers of width 64; four microbatches of one sample of 32 tokens. In one process and over four pipeline ranks beside
the plain one-process loop; over two stages of two tensor ranks beside plain layers of those sizes with bare messages.
CPU seconds, all ranks summed, one thread each, start-up excluded; all take turns in one run.
``nox -s bench -- host [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import _plain
import torch
import torch.distributed as dist
from _floor import Floor
from _forked import of_each_rank
from _text import WORDS, find
from torch import Tensor, nn
from torch.nn import functional

from mimo.trainer import Job, Trainer, read_settings, resolve

CONFIG = {"hidden": 64, "layers": 48, "heads": 4, "intermediate": 128}
MICROBATCHES, WORDS_OF_A_SAMPLE = 4, 31
WARM_UP, STEPS = 3, 10

Step: TypeAlias = Callable[[int], Any]


def job_of(**layout: Any) -> Job:
    """Return the model's run in a layout."""
    settings = {
        "run": {"name": "host", "steps": 1000, "global_batch": MICROBATCHES, "micro_batch": 1},
        "data": {"plugin": "text", "words": WORDS_OF_A_SAMPLE},
        "tokenizer": {"plugin": "word", "words": WORDS},
        "modules": {"language": {"plugin": "decoder", "ranks": "0", "config": CONFIG, **layout}},
        "optimizer": {"lr": 1e-3, "clip": 1.0},
    }
    return resolve(read_settings(settings), find=find)


class Plain(nn.Module):
    """The model in plain PyTorch."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(_plain.DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of the losses of a sample [T + 1]."""
        x = self.embedding(tokens[None, :-1])
        cos, sin = _plain.angles(self.config, x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.cross_entropy(self.head(self.norm(x))[0], tokens[1:], reduction="sum")


def make_ours(rank: int, **layout: Any) -> Step:
    """Return what does a step of ours on a rank."""
    return Trainer(job_of(**layout), rank=rank, device="cpu").train


def make_plain(_rank: int) -> Step:
    """Return what does a step of the plain loop."""
    samples = _samples()
    model = Plain(job_of().language.config)
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        count = 0
        for sample in samples(number):
            model(sample).backward()
            count += len(sample) - 1
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def make_floor(rank: int) -> Step:
    """Return what does a step of plain layers with bare messages on a rank."""
    samples = _samples()
    floor = Floor(job_of().language.config, rank)
    return lambda number: floor.step(samples(number))


def _samples() -> Callable[[int], list[Tensor]]:
    job = job_of()
    order, train = job.sample_order(), job.train
    assert train is not None
    return lambda step: [torch.tensor(train.tokens(sample)) for sample in order.samples(step)]


def measure(make: Callable[[int], Step], rank: int) -> float:
    """Return a rank's CPU seconds over the measured steps."""
    step = make(rank)
    for number in range(1, WARM_UP + 1):
        step(number)
    dist.barrier()
    start = time.process_time()
    for number in range(WARM_UP + 1, WARM_UP + STEPS + 1):
        step(number)
    return time.process_time() - start


Make: TypeAlias = Callable[[int], Step]
CASES: dict[str, tuple[Make, int, Make, int, float]] = {
    "one process / plain loop": (make_ours, 1, make_plain, 1, 1.15),
    "pp 4 / plain loop": (partial(make_ours, ranks="0-3", pp=4), 4, make_plain, 1, 1.3),
    "tp 2 pp 2 / plain layers and bare messages": (partial(make_ours, ranks="0-3", tp=2, pp=2), 4, make_floor, 4, 1.2),
}
"""What is compared with what, on how many ranks each, and the most that it is to be."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {f"CPU a step, 48 layers of 64, {name}": [] for name in CASES}
    for _ in range(rounds):
        for (ours, ranks, usual, others, _), (what, ratios) in zip(CASES.values(), found.items(), strict=True):
            mine = sum(of_each_rank(partial(measure, ours), world=ranks)) / STEPS
            plain = sum(of_each_rank(partial(measure, usual), world=others)) / STEPS
            ratios.append(mine / plain)
            print(f"{what}: {mine * 1e3:.1f} ms / {plain * 1e3:.1f} ms = {ratios[-1]:.3f}")
    print(
        json.dumps(
            {
                "bench": "host",
                "ratios": {what: statistics.median(ratios) for what, ratios in found.items()},
                "aims": {what: ["<=", aim] for what, (*_, aim) in zip(found, CASES.values(), strict=True)},
                "runs": rounds,
                "spread": {what: [min(ratios), max(ratios)] for what, ratios in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
