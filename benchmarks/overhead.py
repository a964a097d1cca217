"""CPU time of a training step in four processes over a plain one-process PyTorch loop of the same model.

CPU seconds a sample, all ranks summed, one thread each, start-up excluded; ours and the plain loop take turns in one
run. ``nox -s bench -- overhead [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _plain
import attrs
import torch
import torch.distributed as dist
from _forked import of_each_rank
from _tiled import WORDS, find

from mimo.model import EncoderSpec
from mimo.trainer import Job, Trainer, read_settings, resolve

WARM_UP = 3


@attrs.frozen(kw_only=True)
class Case:
    """A model, its data, and how many steps are measured."""

    settings: dict[str, Any]
    steps: int

    def job(self) -> Job:
        """Resolve the four-process run."""
        return resolve(read_settings(self.settings), find=find)


def _settings(
    data: dict[str, Any], vit: dict[str, int], decoder: dict[str, int], batch: int, **language: Any
) -> dict[str, Any]:
    return {
        "run": {"name": "overhead", "steps": 1000, "global_batch": batch, "micro_batch": batch},
        "data": data,
        "tokenizer": {"plugin": "word", "words": [*WORDS, *DIGIT_WORDS]},
        "modules": {
            "vision": {"plugin": "vit", "ranks": "0-1", "config": {"channels": 1, **vit}},
            "language": {"plugin": "decoder", "ranks": "2-3", "tp": 2, "config": decoder, **language},
        },
        "optimizer": {"lr": 1e-3, "clip": 1.0},
    }


DIGIT_WORDS = ["the", "digit", "is", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LARGER: tuple[dict[str, Any], dict[str, int], dict[str, int], int] = (
    {"plugin": "tiled", "pixels": 30, "words": 30},
    {"patch": 2, "width": 256, "layers": 4, "heads": 8, "intermediate": 1024},
    {"hidden": 384, "layers": 4, "heads": 6, "intermediate": 1024},
    16,
)
CASES = {
    "digits": Case(
        settings=_settings(
            {"plugin": "digits"},
            {"patch": 2, "width": 64, "layers": 2, "heads": 4, "intermediate": 128},
            {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128},
            64,
        ),
        steps=40,
    ),
    "10M": Case(settings=_settings(*LARGER), steps=5),
    "10M, sequence parallel": Case(settings=_settings(*LARGER, sequence_parallel=True), steps=5),
}


def measure_ours(case: Case, rank: int) -> float:
    """Return this rank's CPU seconds over the measured steps."""
    trainer = Trainer(case.job(), rank=rank, device=torch.device("cpu"))
    for step in range(1, WARM_UP + 1):
        trainer.train(step)
    dist.barrier()
    start = time.process_time()
    for step in range(WARM_UP + 1, WARM_UP + case.steps + 1):
        trainer.train(step)
    return time.process_time() - start


def make_loop(case: Case) -> Callable[[int], None]:
    """Return what does a step of the plain loop, of the same samples."""
    job = case.job()
    assert job.train is not None
    order, train = job.sample_order(), job.train
    vision, language = job.module("vision"), job.module("language")
    assert isinstance(vision.spec, EncoderSpec)
    prepare = vision.spec.prepare
    model = _plain.Model(vision.config, language.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(number: int) -> None:
        samples = order.samples(number)
        pictures = torch.cat([prepare(vision.config, train.raw(one, 0))["pixels"] for one in samples])
        tokens = torch.tensor([train.tokens(one)[1:] for one in samples])
        loss = model(pictures, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def measure_plain(case: Case, _rank: int) -> float:
    """Return the plain loop's CPU seconds over as many steps of the same samples."""
    take_step = make_loop(case)
    for step in range(1, WARM_UP + 1):
        take_step(step)
    start = time.process_time()
    for step in range(WARM_UP + 1, WARM_UP + case.steps + 1):
        take_step(step)
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    ratios, spread = {}, {}
    for name, case in CASES.items():
        found, samples = [], case.steps * case.settings["run"]["global_batch"]
        for _ in range(rounds):
            ours = sum(of_each_rank(partial(measure_ours, case), world=4)) / samples
            usual = sum(of_each_rank(partial(measure_plain, case), world=1)) / samples
            found.append(ours / usual)
            print(f"{name}: CPU ms a sample: ours {ours * 1e3:.3f}, plain {usual * 1e3:.3f}, ratio {found[-1]:.3f}")
        what = f"CPU a sample, {name}, ours / plain"
        ratios[what], spread[what] = statistics.median(found), [min(found), max(found)]
    aims = {"CPU a sample, 10M, ours / plain": ["<=", 1.1]}
    print(json.dumps({"bench": "overhead", "ratios": ratios, "aims": aims, "runs": rounds, "spread": spread}))


if __name__ == "__main__":
    main()
