"""Time of a training step with a mixture of experts beside a dense one of as much arithmetic, on the same two cores.

Two of eight experts for each row, each half as wide as the dense layer: as many multiplications, four times the
weights. Over *lanes* (dp 2) and over *tensor ranks* (tp 2, sequence parallelism), with the experts spread over both
ranks (ep 2), and over lanes also with all experts on each rank (ep 1), where only gradients are sent. A step is all of
it: data, forward, backward, reduction, agreement, update. All take turns in one run, one thread a rank. Wall time is
the slower rank's, CPU time that of both. ``nox -s bench -- moe [--rounds N]`` prints a table, and as its last line one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from _forked import in_ranks
from _text import WORDS, find

from mimo.trainer import Job, Trainer, read_settings, resolve

WARM_UP = 3
STEPS = 2
"""Steps of each turn."""
WORLD = 2
BATCH = 16
DENSE = {"hidden": 384, "layers": 4, "heads": 6, "intermediate": 1024}
MIXED = {**DENSE, "experts": 8, "experts_per_token": 2, "expert_intermediate": 512, "balance_loss": 0.01}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lanes, dense": (DENSE, {}),
    "lanes, ep 2": (MIXED, {"ep": 2}),
    "lanes, ep 1": (MIXED, {}),
    "tensor ranks, dense": (DENSE, {"tp": 2, "sequence_parallel": True}),
    "tensor ranks, ep 2": (MIXED, {"tp": 2, "ep": 2, "sequence_parallel": True}),
}
RATIOS = {
    "lanes, ep 2": "lanes, dense",
    "lanes, ep 1": "lanes, dense",
    "tensor ranks, ep 2": "tensor ranks, dense",
}

Times: TypeAlias = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds a step of each turn, by case."""


def job(name: str) -> Job:
    """Resolve a case."""
    config, axes = CASES[name]
    lanes = WORLD // axes.get("tp", 1)
    settings = {
        "run": {"name": "moe", "steps": 1000, "global_batch": BATCH, "micro_batch": BATCH // lanes},
        "data": {"plugin": "text"},
        "tokenizer": {"plugin": "word", "words": WORDS},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-1", "config": config, **axes}},
        "optimizer": {"lr": 1e-3, "clip": 1.0},
    }
    return resolve(read_settings(settings), find=find)


def measure(rank: int, rounds: int) -> Times:
    """Return the times of all cases, the same on both ranks."""
    trainers = {name: Trainer(job(name), rank=rank, device=torch.device("cpu")) for name in CASES}
    done = dict.fromkeys(CASES, 0)

    def run(name: str, steps: int) -> None:
        for step in range(done[name] + 1, done[name] + steps + 1):
            trainers[name].train(step)
        done[name] += steps

    times: Times = {name: [] for name in CASES}
    for name in CASES:
        run(name, WARM_UP)
    for _ in range(rounds):
        for name in CASES:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            run(name, STEPS)
            took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64) / STEPS
            both = [torch.empty_like(took) for _ in range(WORLD)]
            dist.all_gather(both, took)
            walls, cpus = torch.stack(both).unbind(1)
            times[name].append((float(walls.max()), float(cpus.sum())))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    times = in_ranks(measure, world=WORLD, rounds=rounds)
    for name, turns in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*turns, strict=True))
        print(f"{name}: wall {wall * 1e3:.0f} ms, CPU {cpu * 1e3:.0f} ms a step of {BATCH} x 256 tokens")
    ratios, spread = {}, {}
    for name, dense in RATIOS.items():
        for column, kind in enumerate(("time", "CPU")):
            found = [one[column] / other[column] for one, other in zip(times[name], times[dense], strict=True)]
            what = f"{kind}, {name} / dense"
            ratios[what], spread[what] = statistics.median(found), [min(found), max(found)]
            print(f"  {what}: {ratios[what]:.3f}")
    print(json.dumps({"bench": "moe", "ratios": ratios, "aims": {}, "runs": rounds, "spread": spread}))


if __name__ == "__main__":
    main()
