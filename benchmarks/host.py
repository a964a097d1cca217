"""CPU seconds of a training step of a deep narrow model, whose time is the host's: over plain loops without us.

48 layers of width 64; four microbatches of one sample of 32 tokens. In one process and over four pipeline ranks beside
the plain one-process loop; over two stages of two tensor ranks beside plain layers of those sizes with bare messages.
And of the digit reader in four processes, two lanes that see and two tensor ranks that read, beside such layers too,
and beside the plain loop of `overhead`.
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
import attrs
import torch
import torch.distributed as dist
from _floor import Floor, SeeingFloor
from _forked import of_each_rank
from _text import WORDS, find
from overhead import CASES as MODELS
from overhead import make_loop
from torch import Tensor, nn
from torch.nn import functional

from mimo.model import EncoderSpec
from mimo.trainer import Job, Trainer, read_settings, resolve

CONFIG = {"hidden": 64, "layers": 48, "heads": 4, "intermediate": 128}
MICROBATCHES, WORDS_OF_A_SAMPLE = 4, 31
WARM_UP = 3

Step: TypeAlias = Callable[[int], Any]
Make: TypeAlias = Callable[[int], Step]


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


def make_digits(rank: int) -> Step:
    """Return what does a step of the digit reader on a rank."""
    return Trainer(MODELS["digits"].job(), rank=rank, device="cpu").train


def make_digits_floor(rank: int) -> Step:
    """Return what does a step of the same with plain layers and bare messages."""
    job = MODELS["digits"].job()
    assert job.train is not None
    order, train = job.sample_order(), job.train
    vision, language = job.module("vision"), job.module("language")
    assert isinstance(vision.spec, EncoderSpec)
    prepare = vision.spec.prepare
    floor = SeeingFloor(vision.config, language.config, rank)
    (rows,) = {vision.spec.rows(vision.config, train.infos(sample)[0].size) for sample in order.samples(1)}

    def step(number: int) -> None:
        samples = order.samples(number)
        mine = samples[floor.half :: 2] if floor.sees else ()
        pixels = [prepare(vision.config, train.raw(sample, 0))["pixels"] for sample in mine]
        ordered = [*samples[::2], *samples[1::2]]
        tokens = torch.tensor([train.tokens(sample)[1:] for sample in ordered])
        floor.step(torch.cat(pixels) if pixels else torch.empty(0), tokens, rows)

    return step


def make_digits_loop(_rank: int) -> Step:
    """Return what does a step of the same in one process by the plain loop."""
    return make_loop(MODELS["digits"])


def _samples() -> Callable[[int], list[Tensor]]:
    job = job_of()
    order, train = job.sample_order(), job.train
    assert train is not None
    return lambda step: [torch.tensor(train.tokens(sample)) for sample in order.samples(step)]


def measure(make: Make, steps: int, rank: int) -> float:
    """Return a rank's CPU seconds a step."""
    step = make(rank)
    for number in range(1, WARM_UP + 1):
        step(number)
    dist.barrier()
    start = time.process_time()
    for number in range(WARM_UP + 1, WARM_UP + steps + 1):
        step(number)
    return (time.process_time() - start) / steps


@attrs.frozen
class Case:
    """What is compared with what, on how many ranks each, and the most that it is to be, if that is said."""

    ours: Make
    ranks: int
    plain: Make
    plain_ranks: int
    aim: float | None
    steps: int = 10


DEEP = "CPU a step, 48 layers of 64"
CASES = {
    f"{DEEP}, one process / plain loop": Case(make_ours, 1, make_plain, 1, 1.15),
    f"{DEEP}, pp 4 / plain loop": Case(partial(make_ours, ranks="0-3", pp=4), 4, make_plain, 1, 1.3),
    f"{DEEP}, tp 2 pp 2 / plain layers and bare messages": Case(
        partial(make_ours, ranks="0-3", tp=2, pp=2), 4, make_floor, 4, 1.2
    ),
    "CPU a step, digits, four processes / plain layers and bare messages": Case(
        make_digits, 4, make_digits_floor, 4, 1.3, steps=40
    ),
    "CPU a step, digits, four processes / plain loop": Case(make_digits, 4, make_digits_loop, 1, None, steps=40),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    parser.add_argument("--cases", default="", help="those alone whose names have this in them")
    options = parser.parse_args()
    rounds = options.rounds
    found: dict[str, list[float]] = {name: [] for name in CASES if options.cases in name}
    for _ in range(rounds):
        for what, ratios in found.items():
            case = CASES[what]
            mine = sum(of_each_rank(partial(measure, case.ours, case.steps), world=case.ranks))
            plain = sum(of_each_rank(partial(measure, case.plain, case.steps), world=case.plain_ranks))
            ratios.append(mine / plain)
            print(f"{what}: {mine * 1e3:.1f} ms / {plain * 1e3:.1f} ms = {ratios[-1]:.3f}")
    print(
        json.dumps(
            {
                "bench": "host",
                "ratios": {what: statistics.median(ratios) for what, ratios in found.items()},
                "aims": {what: ["<=", aim] for what in found if (aim := CASES[what].aim) is not None},
                "runs": rounds,
                "spread": {what: [min(ratios), max(ratios)] for what, ratios in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
