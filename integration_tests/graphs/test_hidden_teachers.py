"""The oracle over teachers' hidden rows: in every layout of teacher and student what both models come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import Modules
from jobs import CPU, make_job
from oracle import Oracle
from tables import TEACHER, Table, alone, scheduled, table, world_of
from test_oracle_images import MODELS, settings_of

from mimo.testing import Pool
from mimo.trainer import Trainer

SP: Mapping[str, Any] = {"sequence_parallel": True}
WIDE: Mapping[str, Any] = {**TEACHER, "hidden": 24}
"""Config of a teacher as wide as the student."""


def on(first: int, last: int, **keys: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``, and other keys of its module."""
    return {"ranks": list(range(first, last + 1)), **keys}


def teacher(first: int, last: int, hidden: str = "mse", *, top_k: int = 0, **keys: Any) -> dict[str, Any]:
    """Return the same of a teacher of hidden rows, and of ids where there are any."""
    distil = {"top_k": top_k, "hidden": hidden, "hidden_weight": 0.7} | ({"temperature": 2.0} if top_k else {})
    return on(first, last, distil=distil, config=WIDE, **({"loss_weight": 0.3} if top_k else {}), **keys)


BOTH: Mapping[str, Any] = {"top_k": 3}
LAYOUTS: dict[str, Modules] = {
    "apart, ahead": {"teacher": teacher(0, 0, "cosine", prefetch=True), "language": on(1, 1, loss_rows=5)},
    "lanes together": {"teacher": teacher(0, 2, **BOTH), "language": on(0, 2)},
    "tp2 sp both": {"teacher": teacher(0, 1, tp=2, **SP), "language": on(0, 1, tp=2, round_rows=3, **SP)},
    "tp2 sp both, with ids": {
        "teacher": teacher(0, 1, "cosine", tp=2, **SP, **BOTH),
        "language": on(1, 2, tp=2, loss_rows=4, **SP),
    },
    "tp2 to tp3 sp": {"teacher": teacher(0, 1, "cosine", tp=2), "language": on(0, 2, tp=3, **SP)},
    "tp2 sp cp2 to tp2": {"teacher": teacher(0, 3, tp=2, cp=2, **SP), "language": on(2, 3, tp=2, recompute="full")},
    "pp2 to cp2 tp2 sp": {"teacher": teacher(0, 1, pp=2), "language": on(0, 3, cp=2, tp=2, **SP)},
    "cp2 to pp2": {"teacher": teacher(0, 3, "cosine", cp=2, **BOTH), "language": on(1, 2, pp=2)},
}


def check(oracle: Oracle, settings: Table) -> None:
    """Compare a layout with one process."""
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_changes_what_hidden_rows_teach(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with weights of targets; samples with pictures aren't taught."""
    modules = {"vision": on(0, 1), **LAYOUTS[layout]}
    check(oracle, table(modules, microbatches=2, weights="mixed"))


def test_hidden_rows_instead_of_labels(oracle: Oracle) -> None:
    """Nothing then reaches the head, which is decayed alone; rows are those before further tokens are predicted."""
    modules = {"teacher": teacher(0, 1), "language": on(0, 1, tp=2, loss_weight=0.0, **SP)}
    check(oracle, table(modules, microbatches=2, language={"next_tokens": 1}))


def test_several_teachers_of_unlike_kinds(oracle: Oracle) -> None:
    """One of ids, one of rows that is only reported, and one of both, of which the ids are; the student is adapted."""
    silent = teacher(1, 2, cp=2, top_k=1)
    silent["loss_weight"] = 0.0
    modules = {
        "teacher": {**teacher(0, 0), "distil": {"top_k": 5}, "config": TEACHER},
        "tutor": {**teacher(0, 1), "distil": {"top_k": 0, "hidden": "cosine", "hidden_weight": 0.0}},
        "silent": silent,
        "language": on(0, 1, lora={"rank": 2, "targets": ["*"]}),
    }
    check(oracle, table(modules, microbatches=2, language={"tied": True}))


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_schedules_learn_the_same_of_hidden_rows(schedule: str, oracle: Oracle) -> None:
    """Where backward is split, its first half has all of their gradient to pass on."""
    modules = {"teacher": teacher(0, 1, **BOTH), "language": on(0, 3, pp=2, tp=2, **SP)}
    check(oracle, scheduled(table(modules, microbatches=4), schedule))


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_hidden_rows_teach_models_of_the_library(model: str, oracle: Oracle) -> None:
    """Rows before the head are what they learn, also where those of images see each other or reach further layers."""
    settings = settings_of("cp2 pp2", model)
    first = {"teacher": teacher(0, 1, "cosine", tp=2, **BOTH), "language": settings["modules"]["language"]}
    of_teacher = table(first, microbatches=2)["modules"]["teacher"]
    width = settings["modules"]["language"]["config"]["values"]["hidden_size"]
    settings["modules"]["teacher"] = {**of_teacher, "config": {**TEACHER, "hidden": width, "heads": 4}}
    check(oracle, settings)


def test_hidden_rows_of_shards(oracle: Oracle) -> None:
    """Of a teacher and a student spread over their lanes, whose head nothing is learned by."""
    settings = table({"teacher": teacher(0, 1), "language": on(0, 1, loss_weight=0.0)}, microbatches=2)
    settings["optimizer"] |= {"plugin": "distributed", "shard": "full"}
    check(oracle, settings)


def _reported(rank: int, settings: Table) -> list[Mapping[str, float]]:
    """Return the losses that a step reports, and an evaluation before it."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    evaluation = trainer.evaluate(0)
    assert evaluation is not None
    return [trainer.train(1).losses, evaluation.losses]


def test_losses_by_hidden_rows_are_reported(oracle: Oracle, pool: Pool) -> None:
    """By steps and evaluations, unweighted, beside divergences, and only those that there are, in any layout."""
    modules = {
        "vision": on(0, 1),
        "teacher": teacher(0, 1, tp=2, **BOTH, **SP),
        "tutor": teacher(0, 0, "cosine"),
        "language": on(0, 3, tp=2, **SP),
    }
    settings = table(modules, microbatches=2, weights="mixed")
    ((step, held_out),) = pool.run(1, _reported, alone(settings))
    assert list(step) == list(held_out) == ["teacher.divergence", "teacher.hidden", "tutor.hidden"]
    terms = oracle.truth(settings).terms
    assert step == pytest.approx({name: means[0] for name, means in terms.items()}, rel=1e-5)
    found = pool.run(world_of(settings), _reported, settings)
    assert found == [[pytest.approx(step, rel=1e-5), pytest.approx(held_out, rel=1e-5)]] * 4
