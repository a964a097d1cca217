"""The oracle over teachers: in every layout of teacher and student what both models compared whole come to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import Modules
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_going_on
from tables import TEACHER, Table, alone, by_tokens, scheduled, table, world_of
from test_oracle_images import MODELS, settings_of
from test_oracle_mamba import CONFIG as HYBRID

from mimo.testing import Pool
from mimo.trainer import Trainer

SP: Mapping[str, Any] = {"sequence_parallel": True}


def on(first: int, last: int, **keys: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``, and other keys of its module."""
    return {"ranks": list(range(first, last + 1)), **keys}


def teacher(first: int, last: int, *, top_k: int = 3, temperature: float = 2.0, **keys: Any) -> dict[str, Any]:
    """Return the same of a teacher."""
    return on(first, last, distil={"top_k": top_k, "temperature": temperature}, **{"loss_weight": 0.7, **keys})


EYE: Mapping[str, Any] = {"patch": 2, "channels": 1, "width": 12, "layers": 2, "heads": 2, "intermediate": 9}
LAYOUTS: dict[str, Modules] = {
    "apart": {"teacher": teacher(0, 0), "language": on(1, 1)},
    "ahead, and a few rows at a time": {"teacher": teacher(0, 0, prefetch=True), "language": on(1, 1, loss_rows=5)},
    "lanes together": {"teacher": teacher(0, 2, loss_rows=4), "language": on(0, 2)},
    "tp2 sp both": {"teacher": teacher(0, 1, tp=2, **SP), "language": on(0, 1, tp=2, round_rows=3, **SP)},
    "pp2 to cp2": {"teacher": teacher(0, 1, pp=2, prefetch=True), "language": on(2, 3, cp=2, recompute="full")},
    "cp2 to pp2": {"teacher": teacher(0, 3, cp=2), "language": on(1, 2, pp=2)},
    "tp3 to more lanes": {"teacher": teacher(0, 2, tp=3), "language": on(0, 3)},
}


BESIDE: Modules = {
    "vision": on(0, 2),
    "teacher": teacher(0, 1, tp=2, prefetch=True),
    "language": on(1, 2, cp=2, loss_weight=0.5),
}


def check(oracle: Oracle, settings: Table) -> None:
    """Compare a layout with one process."""
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_changes_what_is_taught(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with weights of targets."""
    check(oracle, table(LAYOUTS[layout], microbatches=2, weights="mixed"))


@pytest.mark.parametrize("pictures", ["mixed", "none"])
def test_teachers_that_see(pictures: str, oracle: Oracle) -> None:
    """By an encoder of another width and in other lanes; they skip what they can't see, and drop nothing."""
    modules = {
        "vision": on(0, 1),
        "glyph": on(2, 2),
        "eye": on(1, 3, feeds="teacher", modality="image", batch_factor=2, config={**EYE, "drop_path": 0.5}),
        "teacher": teacher(0, 1, cp=2, config={**TEACHER, "hidden_dropout": 0.5}),
        "language": on(2, 3, tp=2, **SP),
    }
    check(oracle, table(modules, microbatches=2, pictures=pictures, weights="mixed"))


def test_teachers_that_see_ahead(oracle: Oracle) -> None:
    """Both the teacher and its encoder a step ahead; of a broken picture nothing is learned, from nobody."""
    modules = {
        "vision": on(0, 1),
        "eye": on(2, 2, feeds="teacher", modality="image", prefetch=True),
        "teacher": teacher(0, 2, pp=3, config={**TEACHER, "layers": 3}, prefetch=True),
        "language": on(0, 1, cp=2),
    }
    settings = table(modules, microbatches=2)
    settings["data"] |= {"damaged": [2, 3, 5, 7, 11, 13], "max_broken": 1.0}
    check(oracle, settings)


@pytest.mark.parametrize("pictures", ["mixed", "digits", "none"])
def test_samples_with_pictures_are_learned_by_labels_alone(pictures: str, oracle: Oracle) -> None:
    """As teachers see none; they may have nothing to read at all, and encoders neither."""
    check(oracle, table(BESIDE, microbatches=2, pictures=pictures))


def test_teachers_instead_of_labels(oracle: Oracle) -> None:
    """Two of unlike temperature, of which one is only reported with the labels' loss."""
    config = {"hidden": 12, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 16}
    modules = {
        "teacher": teacher(0, 1, top_k=5, temperature=1.0),
        "tutor": teacher(1, 2, cp=2, top_k=1, config=config),
        "silent": teacher(0, 0, loss_weight=0.0),
        "language": on(0, 1, dp=2, loss_weight=0.0, loss_rows=6),
    }
    check(oracle, table(modules, language={"experts": 4, "dense_layers": 1, "balance_loss": 0.05, "next_tokens": 1}))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v", "ahead"])
def test_schedules_are_taught_the_same(schedule: str, oracle: Oracle) -> None:
    """What a teacher says enters the last stage, wherever that lies and whenever it is its turn."""
    modules = {"teacher": teacher(0, 1, pp=2), "language": on(0, 1, pp=2)}
    check(oracle, scheduled(table(modules, microbatches=4), schedule))


def test_shards_of_a_frozen_teacher(oracle: Oracle) -> None:
    """A teacher spread over its lanes is gathered in each forward, and takes no part in any sum."""
    settings = table({"teacher": teacher(0, 1), "language": on(0, 1)}, microbatches=2)
    settings["optimizer"] |= {"plugin": "distributed", "shard": "full"}
    check(oracle, settings)


def test_cut_samples_are_taught_as_far_as_they_are_read(oracle: Oracle) -> None:
    """A teacher reads no more of them than its student, whose context ranks have slices of what is left."""
    settings = table({"teacher": teacher(0, 1, tp=2), "language": on(1, 2, cp=2)}, microbatches=2, weights="mixed")
    settings["data"]["max_tokens"] = 12
    check(oracle, settings)


def test_ragged_steps_and_microbatches_are_taught(oracle: Oracle) -> None:
    """Of as many tokens as fit, some of them in samples that no teacher reads."""
    check(oracle, by_tokens(table(BESIDE, pictures="mixed"), batch_tokens=130, micro_tokens=45))


def test_a_teacher_of_state_space_layers(oracle: Oracle) -> None:
    """Which looks at all rows before in another way, in stages of its own, of a student of plain attention."""
    config = {key: HYBRID[key] for key in HYBRID if key in TEACHER or key.startswith("mamba")}
    modules = {
        "teacher": teacher(0, 1, pp=2, plugin="hybrid", config={**config, "pattern": "M*-M"}),
        "language": on(1, 2, tp=2, **SP),
    }
    check(oracle, table(modules, microbatches=2))


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_teachers_of_the_library(model: str, oracle: Oracle) -> None:
    """Their own likeliest ids, of a student of ours in context ranks."""
    language = settings_of("cp2 pp2", model)["modules"]["language"]
    keys = {key: language[key] for key in ("plugin", "config")}
    check(oracle, table({"teacher": teacher(0, 1, **keys), "language": on(1, 2, cp=2)}, microbatches=2))


def _reported(rank: int, settings: Table) -> tuple[float, float]:
    """Return the divergence that a step reports, and an evaluation before it."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    evaluation = trainer.evaluate(0)
    assert evaluation is not None
    return trainer.train(1).losses["teacher.divergence"], evaluation.losses["teacher.divergence"]


def test_divergences_are_reported(oracle: Oracle, pool: Pool) -> None:
    """By steps and evaluations, over the weight of all labels, the same in any layout; the loss is that by labels."""
    settings = table(BESIDE, microbatches=2, weights="mixed")
    (step, held_out), *_ = alone_found = pool.run(1, _reported, alone(settings))
    assert step == pytest.approx(oracle.truth(settings).terms["teacher.divergence"][0], rel=1e-5)
    assert held_out > 0
    assert pool.run(world_of(settings), _reported, settings) == [
        pytest.approx(one, rel=1e-5) for one in alone_found * 3
    ]


def test_a_run_resumes_with_its_teacher_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    """Module by module, each wherever it lies then."""
    first, second = (table(LAYOUTS[layout], microbatches=2) for layout in ("pp2 to cp2", "tp2 sp both"))
    for settings in (first, second):
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, first, second, exactly=False)
