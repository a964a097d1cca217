"""Tokens that count more or less than others or nothing at all, beside the truth.

`test_oracle_distributed` has weights beside every other choice; here are lanes, microbatches and whole steps that weigh
nothing, losses beside the main one, and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import attrs
import numpy as np
import pytest
from cases import Modules, in_turn, some
from jobs import CPU, make_job
from oracle import Oracle, run_layout
from tables import EVEN_EPS, RATE, SAMPLES, STEPS, Table, alone, table, world_of
from test_oracle import SOFTMAX, SP, on
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_next_tokens import FURTHER
from truth import weights_by_hand

from mimo.data import SampleOrder
from mimo.hooks import EvaluationInfo, StepInfo
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import StepData, language_batch

LAYOUTS: dict[str, Modules] = {
    "pp2 tp2 cp2 sp, ep4": {"vision": on(0, 2), "language": on(0, 7, pp=2, tp=2, cp=2, ep=4, **SP)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "cp3 of two lanes, pp2 in vision": {"vision": on(0, 1, pp=2), "language": on(0, 5, cp=3)},
    "two encoders, tp2 sp of two lanes": {
        "vision": on(0, 1),
        "glyph": on(2, 4),
        "language": on(3, 6, tp=2, loss_rows=3, **SP),
    },
    "ep4 over lanes": {"vision": on(0, 0), "language": on(0, 3, ep=4)},
    "pp3": {"vision": on(0, 0), "language": on(1, 3, pp=3, loss_rows=5)},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "experts": {"config": {**SOFTMAX, "hidden": 24, "layers": 3, "heads": 6, "kv_heads": 2, "intermediate": 37}},
    "hybrid": {"plugin": "hybrid", "config": {**HYBRID, **FURTHER, "z_loss": 0.01}},
}
HOW = [("experts", "first"), ("hybrid", "mixed"), ("hybrid", "first")]


@pytest.mark.parametrize(("layout", "how"), in_turn(LAYOUTS, HOW))
def test_losses_of_all_kinds_count_by_weight(layout: str, how: tuple[str, str], oracle: Oracle) -> None:
    """The main one, those of routers and of tokens further on, where lanes and microbatches weigh nothing too."""
    model, weights = how
    modules = {**LAYOUTS[layout]}
    modules["language"] = {**MODELS[model], **modules["language"]}
    settings = table(modules, microbatches=2, weights=weights, eps=EVEN_EPS)
    assert oracle.check(oracle.clear(settings)) == ""


def infos_of(rank: int, settings: Table) -> list[StepInfo]:
    """Return what the steps of a run come to on a rank."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    return [trainer.train(step) for step in range(1, STEPS + 1)]


def test_a_step_that_weighs_nothing_is_skipped(oracle: Oracle, pool: Pool) -> None:
    """Nothing learns from it, moments neither; data and learning rate go on, and it says that it was skipped."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = table(modules, microbatches=2, weights="first")
    settings["optimizer"] |= {"lr_warmup_steps": STEPS}
    data = make_job(settings).train
    assert data is not None
    for seed in count():
        order = SampleOrder.of(data, global_batch=SAMPLES, seed=seed)
        steps = [order.samples(step) for step in range(1, STEPS + 1)]
        if [any(sample % SAMPLES == 0 for sample in samples) for samples in steps] == [True, False, True]:
            settings["run"]["seed"] = seed
            break
    assert oracle.check(settings) == ""
    (expected,) = pool.run(1, infos_of, alone(settings))
    for found in pool.run(world_of(settings), infos_of, settings):
        assert [info.skipped for info in found] == [False, True, False]
        assert [info.lr for info in found] == pytest.approx([RATE / 3, RATE * 2 / 3, RATE])
        assert [info.label_tokens for info in found] == [info.label_tokens for info in expected]
        assert [info.label_weight for info in found] == pytest.approx([info.label_weight for info in expected])
        assert (found[1].loss, found[1].label_tokens, found[1].label_weight) == (0.0, 0, 0.0)
        assert 0 < found[0].label_tokens != found[0].label_weight


def test_weights_of_one_are_no_weights(pool: Pool) -> None:
    """To the bit: losses, gradients and weights of the model."""
    modules, language = {"vision": on(0, 0), "language": on(0, 0)}, {**SOFTMAX, **FURTHER}
    (without,), (ones,) = (
        pool.run(1, run_layout, table(modules, weights=weights, language=language)) for weights in ("none", "one")
    )
    assert (without.losses, without.norms) == (ones.losses, ones.norms)
    for kind in ("gradients", "weights"):
        first, second = getattr(without, kind), getattr(ones, kind)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name].values, second[name].values) for name in first)


TRAINED = 36
"""Steps after which some held-out samples are right in all that counts, and likeliest ids differ from row to row."""


def evaluated(rank: int, settings: Table) -> EvaluationInfo:
    """Train some steps and evaluate."""
    info = trained(rank, settings).evaluate(TRAINED)
    assert info is not None
    return info


def trained(rank: int, settings: Table) -> Trainer:
    """Return the trainer after some steps."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    for step in range(1, TRAINED + 1):
        trainer.train(step)
    return trainer


def evaluated_by_hand(rank: int, settings: Table) -> EvaluationInfo:
    """Train likewise, then go through the held-out samples one by one."""
    trainer = trained(rank, settings)
    (part,) = trainer.model.parts.values()
    job, language = trainer.job, part.language
    assert job.evaluation is not None
    loss, total, right, judged = 0.0, 0.0, 0, 0
    for sample in range(len(job.evaluation)):
        (batch,) = StepData.cut(job, job.evaluation, [sample], microbatches=1).microbatches
        packed = language_batch(batch.packed(job.language, 0), job, CPU, trains=False)
        hidden = language(packed, {}, None).detach()
        weights = weights_by_hand(job, job.evaluation, [sample], packed)
        loss += float((language.losses(hidden, packed.labels) * weights).sum())
        total += float(weights.sum())
        hits = (language.greedy(hidden) == packed.labels)[weights > 0]
        judged += len(hits) > 0
        right += len(hits) > 0 and bool(hits.all())
    return EvaluationInfo(step=TRAINED, loss=loss / total, exact_match=right / judged, samples=judged)


EVALUATED: dict[str, Modules] = {
    "tp2 sp, few rows at a time": {"language": on(0, 1, tp=2, loss_rows=4, **SP)},
    "pp2 cp2 of two lanes": {"language": on(0, 7, pp=2, cp=2)},
}


@pytest.mark.parametrize("layout", some(EVALUATED, ["tp2 sp, few rows at a time"]))
def test_evaluations_count_by_weight_too(layout: str, pool: Pool) -> None:
    """The loss; and of a sample those tokens must be right that weigh something: one without any is not judged."""
    settings = table(EVALUATED[layout], microbatches=2, weights="mixed")
    settings["run"]["steps"] = TRAINED
    settings["optimizer"] |= {"lr": 10 * RATE}
    (expected,) = pool.run(1, evaluated_by_hand, alone(settings))
    assert 0 < expected.exact_match < 1
    for found in pool.run(world_of(settings), evaluated, settings):
        assert attrs.evolve(found, loss=0.0) == attrs.evolve(expected, loss=0.0)
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
