"""A mixture read for several epochs by runs that are killed and resumed: each sample as often as if none had been."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import make_job
from resuming import begin
from tables import Table
from torch import nn

from mimo.data import SampleOrder
from mimo.model.runtime import LanguageBatch
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import save_step

SIZES: Mapping[str, int] = {"captions": 20, "letters": 12, "numbers": 5}
BATCH, STEPS = 12, 20
EPOCHS = 3
"""So often at least each source is read."""
EVEN = {"captions": 4.0, "letters": 2.4, "numbers": 1.0}
"""Weights at first: as the sources' sizes are."""

Reads = dict[int, list[str]]
"""By step, the texts of the samples that the language model read."""


@attrs.frozen(kw_only=True)
class Attempt:
    """A part of a run, from what was saved last until it is killed.

    Args:
        lanes: of the language model.
        weights: of the sources.
        last: the step that it finishes last; it is killed in the one after, between its forward and its update.
        saves: steps that it saves, if it comes so far.
    """

    lanes: int
    weights: Mapping[str, float]
    last: int
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


def read_and_die(rank: int, settings: Table, attempt: Attempt, first: int) -> Reads:
    """Run an attempt on a rank, and return what its language model read in each step."""
    trainer, _, state = begin(rank, settings, settings["run"]["directory"] if first > 1 else "")
    reads: Reads = {}
    step = first

    def note(_module: nn.Module, given: tuple[Any, ...]) -> None:
        reads.setdefault(step, []).extend(texts_of(trainer, given[0]))

    (part,) = trainer.model.parts_of("language")
    part.module.register_forward_pre_hook(note)
    for step in range(first, attempt.last + 1):
        trainer.train(step)
        if step in attempt.saves:
            save_step(trainer, state, [], step)
    if attempt.last < STEPS:
        step = attempt.last + 1
        trainer.accumulate(step)
    return reads


def texts_of(trainer: Trainer, batch: LanguageBatch) -> list[str]:
    """Return the texts of the samples of a microbatch, from the ids that the language model is given."""
    ids, found = batch.tokens.tolist(), []
    for length in batch.lengths:
        sample, ids = ids[:length], ids[length:]
        found.append(trainer.job.tokenizer.decode(sample))
    return found


def attempts(draw: random.Random) -> list[Attempt]:
    """Return attempts on 1, 3 and 2 lanes and then drawn ones, with new weights from the second or a later one on."""
    found: list[Attempt] = []
    weights = dict(EVEN)
    change = draw.randint(1, 2)
    while not found or found[-1].last < STEPS:
        number = len(found)
        if number >= change:
            weights = {name: draw.uniform(0.7, 1.3) * weight for name, weight in weights.items()}
            change = number + draw.randint(1, 3)
        lanes = (1, 3, 2)[number] if number < 3 else draw.choice((1, 2, 3))
        last = min(STEPS, (found[-1].last if found else 0) + draw.randint(0 if number else 2, 7))
        if number < 2:
            last = min(last, STEPS - 4)  # leaves something to the third
        saves = frozenset(draw.sample(range(1, STEPS + 1), STEPS // 2))
        found.append(Attempt(lanes=lanes, weights=weights, last=last, saves=saves))
    return found


def expected_reads(folder: Path, tried: Sequence[Attempt], firsts: Sequence[int]) -> Reads:
    """Return what is read along the trajectory that survives, by the definition of the order alone."""
    saved: dict[int, SampleOrder] = {}
    for attempt, first in zip(tried, firsts, strict=True):
        job = make_job(settings_of(folder, attempt))
        order = job.sample_order()  # of one that begins, where nothing has been saved
        if first > 1:
            order = saved[first - 1].with_weights(first, attempt.weights)
        saved |= {step: order for step in attempt.saves if first <= step <= attempt.last}
    assert job.train is not None
    texts = [job.tokenizer.decode(job.train.tokens(sample)) for sample in range(len(job.train))]
    return {step: [texts[sample] for sample in order.samples(step)] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.soak, id=str(seed)) for seed in range(30)]
)
def test_a_killed_run_reads_each_sample_as_often_as_one_that_never_was(seed: int, tmp_path: Path, pool: Pool) -> None:
    """On one, three and two lanes and more, killed anywhere, with new weights on the way, over three epochs."""
    write_sources(tmp_path)
    tried = attempts(random.Random(seed))
    firsts: list[int] = []
    reads: Reads = {}
    saved = 0
    for attempt in tried:
        first = saved + 1
        ranks = pool.run(attempt.lanes, read_and_die, settings_of(tmp_path, attempt), attempt, first)
        firsts.append(first)
        survived = {step: found for step, found in reads.items() if step < first}
        own = {step: [text for rank in ranks for text in rank.get(step, [])] for step in range(first, attempt.last + 1)}
        reads = survived | own
        saved = max((step for step in attempt.saves if first <= step <= attempt.last), default=saved)
    expected = expected_reads(tmp_path, tried, firsts)
    assert reads.keys() == expected.keys()
    assert {step: Counter(found) for step, found in reads.items()} == {
        step: Counter(found) for step, found in expected.items()
    }
    counts = Counter(text for found in reads.values() for text in found)
    for name, samples in SIZES.items():
        times = [counts[f"{name} {number}"] for number in range(samples)]
        assert max(times) - min(times) <= 1, name
        assert min(times) >= EPOCHS, name
