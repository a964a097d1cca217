"""A mixture read for several epochs by runs that are killed and resumed: each sample as often as if none had been."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import make_job
from resuming import begin
from tables import Table
from torch import nn

from mimo.data import SampleOrder
from mimo.hooks import CheckpointError
from mimo.model.runtime import LanguageBatch
from mimo.testing import Pool, RanksError
from mimo.trainer import Trainer
from mimo.trainer.runtime import find_source, save_step

SIZES: Mapping[str, int] = {"captions": 20, "letters": 12, "numbers": 5}
BATCH, STEPS = 12, 20
EPOCHS = 3
"""So often at least each source is read."""
EVEN = {"captions": 4.0, "letters": 2.4, "numbers": 1.0}
"""Weights at first: as the sources' sizes are."""

KILLS = 8
"""So often at most a run is killed."""
DELAY = 0.03
"""Seconds within which a rank is killed once its step has begun; a step takes about half as long."""

Reads = dict[int, list[str]]
"""By step, the texts of the samples that the language model read."""


@attrs.frozen(kw_only=True)
class Attempt:
    """A part of a run, from what was saved last until it is killed.

    Args:
        number: from 0 on.
        lanes: of the language model.
        workers: threads of each rank that read ahead.
        weights: of the sources.
        lives: steps before the one in which it is killed.
        delays: seconds after the beginning of that step, for each rank.
        saves: steps that it saves, if it comes so far.
    """

    number: int
    lanes: int
    workers: int
    weights: Mapping[str, float]
    lives: int
    delays: tuple[float, ...]
    saves: frozenset[int]


def write_sources(folder: Path) -> None:
    """Write a file for each source, in which each sample's text is its own."""
    for name, samples in SIZES.items():
        lines = (json.dumps({"text": f"{name} {number}"}) for number in range(samples))
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def settings_of(folder: Path, attempt: Attempt) -> Table:
    """Return the settings of a run on so many lanes."""
    return {
        "run": {
            "name": "mixture",
            "directory": str(folder / "run"),
            "steps": STEPS,
            "seed": 3,
            "global_batch": BATCH,
            "micro_batch": 2,
        },
        "data": {
            "plugin": "mixture",
            "workers": attempt.workers,
            "sources": {
                name: {"plugin": "jsonl", "path": str(folder / f"{name}.jsonl"), "weight": attempt.weights[name]}
                for name in SIZES
            },
        },
        "modules": {
            "language": {
                "plugin": "decoder",
                "ranks": list(range(attempt.lanes)),
                "config": {"hidden": 8, "layers": 1, "heads": 1, "intermediate": 8},
            }
        },
    }


def read_and_die(rank: int, settings: Table, attempt: Attempt, first: int) -> None:
    """Run an attempt on a rank, and write down what its language model reads in each step, as it reads it."""
    trainer, _, state = begin(rank, settings, settings["run"]["directory"] if first > 1 else "")
    step = first
    with (trainer.job.directory / f"reads_{attempt.number}_{rank}").open("w", encoding="utf-8", buffering=1) as file:

        def note(_module: nn.Module, given: tuple[Any, ...]) -> None:
            file.write(json.dumps([step, texts_of(trainer, given[0])]) + "\n")

        (part,) = trainer.model.parts_of("language")
        part.module.register_forward_pre_hook(note)
        for step in range(first, STEPS + 1):
            if step == first + attempt.lives:
                threading.Timer(attempt.delays[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
            trainer.train(step)
            if step in attempt.saves:
                save_step(trainer, state, [], step)
        if first + attempt.lives <= STEPS:
            threading.Event().wait()  # until it is killed


def texts_of(trainer: Trainer, batch: LanguageBatch) -> list[str]:
    """Return the texts of the samples of a microbatch, from the ids that the language model is given."""
    ids, found = batch.tokens.tolist(), []
    for length in batch.lengths:
        sample, ids = ids[:length], ids[length:]
        found.append(trainer.job.tokenizer.decode(sample))
    return found


def attempts(draw: random.Random) -> Iterator[Attempt]:
    """Yield attempts on 1, 3 and 2 lanes and then drawn ones, with new weights from the second or a later one on."""
    weights = dict(EVEN)
    change = draw.randint(1, 2)
    for number in range(KILLS + 1):
        if number >= change:
            weights = {name: draw.uniform(0.7, 1.3) * weight for name, weight in weights.items()}
            change = number + draw.randint(1, 3)
        lanes = (1, 3, 2)[number] if number < 3 else draw.choice((1, 2, 3))
        moment = draw.uniform(0, DELAY)
        yield Attempt(
            number=number,
            lanes=lanes,
            workers=(0, 2, 1)[number % 3],
            weights=weights,
            lives=STEPS if number == KILLS else draw.randint(0, 6),
            delays=tuple(max(moment + draw.uniform(-0.002, 0.002), 0.0) for _ in range(lanes)),
            saves=frozenset(draw.sample(range(1, STEPS + 1), STEPS // 2)),
        )


def reads_of(folder: Path, attempt: Attempt) -> Reads:
    """Return what the ranks of an attempt have written down; the last line of one that was killed may lack its end."""
    found: Reads = {}
    for path in folder.glob(f"run/reads_{attempt.number}_*"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            step, texts = json.loads(line)
            found.setdefault(step, []).extend(texts)
    return found


def first_step(settings: Table) -> int:
    """Return the step after the last one that was saved whole."""
    directory = Path(settings["run"]["directory"])
    if not (directory / "checkpoints").exists():
        directory.mkdir(exist_ok=True)
        return 1
    try:
        source = find_source(make_job({**settings, "checkpoint": {"load": str(directory)}}).settings)
    except CheckpointError:  # it was killed while it saved the first one
        return 1
    assert source is not None
    return source.first_step


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.soak, id=str(seed)) for seed in range(30)]
)
def test_a_killed_run_reads_each_sample_as_often_as_one_that_never_was(seed: int, tmp_path: Path, pool: Pool) -> None:
    """On 1, 3 and 2 lanes and more, with 0, 2 and 1 threads, killed anywhere, with new weights, over three epochs."""
    write_sources(tmp_path)
    reads: Reads = {}
    orders: dict[int, SampleOrder] = {}
    kills = 0
    for attempt in attempts(random.Random(seed)):
        settings = settings_of(tmp_path, attempt)
        first = first_step(settings)
        is_killed = first + attempt.lives <= STEPS
        with pytest.raises(RanksError, match="exit code -9") if is_killed else nullcontext():
            pool.run(attempt.lanes, read_and_die, settings, attempt, first)
        kills += is_killed
        order = make_job(settings).sample_order()
        if first > 1:
            order = orders[first - 1].with_weights(first, attempt.weights)
        orders |= dict.fromkeys(range(first, STEPS + 1), order)
        reads = {step: found for step, found in reads.items() if step < first} | reads_of(tmp_path, attempt)
        if not is_killed:
            break
    assert kills >= 2
    job = make_job(settings)
    assert job.train is not None
    texts = [job.tokenizer.decode(job.train.tokens(sample)) for sample in range(len(job.train))]
    expected = {step: Counter(texts[sample] for sample in order.samples(step)) for step, order in orders.items()}
    assert {step: Counter(found) for step, found in reads.items()} == expected
    counts = sum(expected.values(), Counter[str]())
    for name, samples in SIZES.items():
        times = [counts[f"{name} {number}"] for number in range(samples)]
        assert max(times) - min(times) <= 1, name
        assert min(times) >= EPOCHS, name
