"""The order of samples of a run that resumes: the checkpoint's, with new weights, or refused with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from eye import Table, make_job, on, table

from mimo.checkpoint import Manifest
from mimo.data import FIRST_ORDER, NEWEST_ORDER
from mimo.hooks import CheckpointError, ConfigError
from mimo.trainer.config.settings import LoadSettings
from mimo.trainer.resume.compatibility import check_source, differences
from mimo.trainer.resume.data_order import SavedOrder, order_changes, order_state, resumed_order
from mimo.trainer.resume.resume_point import Source

FOLDER = Path("run/checkpoints/step_00000003")
SAVED_BY = f"as in the run that '{FOLDER}' was saved by"
ANEW = "Set load.data = false to begin with the data anew."


def mixture(sizes: Mapping[str, int] | None = None, **weights: float) -> Table:
    """Return the settings of a run of text alone, from sources ``a`` and ``b`` unless others are named."""
    found = table({"language": on(0, 0)})
    mock = {"plugin": "mock", "text": 8, "images": 0}
    sources: dict[str, dict[str, Any]] = {
        name: {**mock, "samples": samples} for name, samples in (sizes or {"a": 64, "b": 32}).items()
    }
    for name, weight in weights.items():
        sources[name]["weight"] = weight
    return {**found, "data": {"plugin": "mixture", "sources": sources}}


def saved_by(before: Table, *, order: Any = None, begun: int = 0, finetunes: bool = False, **take: Any) -> Source:
    """Return the third step of a run with such settings, with another state of its order if one is given."""
    job = make_job(before)
    run = job.settings.run
    assert job.train is not None
    progress = {
        "seed": run.seed,
        "global_batch": run.global_batch,
        "samples": len(job.train),
        "schedule_begun": 0,
        "data_begun": begun,
        "order": order_state(job.sample_order()) if order is None else order,
    }
    manifest = Manifest(
        step=3,
        block_bytes=1,
        tensors={},
        shards={},
        common={f"progress.{key}": value for key, value in progress.items() if value != "none"},
        owned={},
        topology={"language": {}},
        config=job.plain,
    )
    return Source(folder=FOLDER, manifest=manifest, take=LoadSettings(**take), finetunes=finetunes)


def refusal(now: Table, source: Source) -> str:
    """Return why settings can't resume a source; empty if they can."""
    try:
        check_source(make_job(now), source)
    except ConfigError as error:
        return str(error)
    return ""


def with_order(settings: Table, version: int) -> Table:
    """Return settings that name a version of the order."""
    return {**settings, "data": {**settings["data"], "order": version}}


def plain(**data: Any) -> Table:
    """Return the settings of a run of one dataset."""
    return table({"language": on(0, 0)}, data=data)


def test_a_run_saved_before_keeps_the_first_order() -> None:
    """Though its file says nothing: its checkpoint has no order."""
    source, job = saved_by(plain(), order="none"), make_job(plain())
    assert refusal(plain(), source) == ""
    order = resumed_order(job, source)
    assert order.version == FIRST_ORDER
    assert order.samples(4) == job.sample_order(version=FIRST_ORDER).samples(4)
    assert order.samples(4) != job.sample_order().samples(4)
    assert [*order_changes(job, source), *differences(job, source)] == []


@pytest.mark.parametrize(("saved", "other"), [(FIRST_ORDER, NEWEST_ORDER), (NEWEST_ORDER, FIRST_ORDER)])
def test_another_version_is_refused(saved: int, other: int) -> None:
    """With what to do; the version that the run has may be written down."""
    source = saved_by(with_order(plain(), saved))
    assert refusal(with_order(plain(), other), source) == (
        f"data.order: expected {saved}, {SAVED_BY}, got {other}. Leave it out: a run keeps its order. {ANEW}"
    )
    assert refusal(with_order(plain(), saved), source) == ""
    assert resumed_order(make_job(plain()), source).version == saved


def test_data_that_begin_anew_have_the_newest_order() -> None:
    """Or the one that settings say, and the change is reported; so has a run that is fine-tuned."""
    job = make_job(plain())
    anew = saved_by(plain(), order="none", data=False)
    assert refusal(with_order(plain(), NEWEST_ORDER), anew) == ""
    assert resumed_order(job, anew).version == NEWEST_ORDER
    assert list(order_changes(job, anew)) == ["data.order 2 (was 1)"]
    first = make_job(with_order(plain(), FIRST_ORDER))
    assert resumed_order(first, anew).version == FIRST_ORDER
    assert list(order_changes(first, anew)) == []
    finetuned = saved_by(plain(), order="none", finetunes=True)
    assert resumed_order(job, finetuned).version == NEWEST_ORDER
    assert list(order_changes(job, finetuned)) == []


def test_new_weights_hold_from_the_first_step_of_the_resumed_run() -> None:
    """They join the history, once, and are reported; twice as much of all is nothing new."""
    source, now = saved_by(mixture(a=1.0, b=1.0)), make_job(mixture(a=3.0, b=1.0))
    order = resumed_order(now, source)
    assert [(change.step, dict(change.weights)) for change in order.changes] == [
        (1, {"a": 1.0, "b": 1.0}),
        (4, {"a": 3.0, "b": 1.0}),
    ]
    assert list(order_changes(now, source)) == ["samples from step 4 on: a 75%, b 25%"]
    assert "data.sources.a.weight 3.0 (was 1.0)" in list(differences(now, source))
    again = saved_by(mixture(a=3.0, b=1.0), order=order_state(order))
    assert resumed_order(now, again).changes == order.changes
    assert list(order_changes(now, again)) == []
    twice = make_job(mixture(a=6.0, b=2.0))
    assert resumed_order(twice, again).changes == order.changes


def test_steps_of_new_weights_are_counted_since_the_data_began() -> None:
    """As the samples are; what is reported is the step of the run."""
    source, now = saved_by(mixture(a=1.0, b=1.0), begun=2), make_job(mixture(a=3.0, b=1.0))
    assert [change.step for change in resumed_order(now, source).changes] == [1, 2]
    assert list(order_changes(now, source)) == ["samples from step 4 on: a 75%, b 25%"]


def test_sources_of_other_sizes_or_names_are_refused() -> None:
    """Each by its name, as a place in the data is counted by them."""
    source = saved_by(mixture())
    fix = f"Positions in the data are counted by it. {ANEW}"
    swapped = refusal(mixture({"a": 32, "b": 64}), source)
    assert f"data: expected 64 samples of a, {SAVED_BY}, got 32. {fix}" in swapped
    assert f"data: expected 32 samples of b, {SAVED_BY}, got 64. {fix}" in swapped
    assert refusal(mixture({"a": 64, "c": 32}), source) == (
        f"data: expected the sources a, b, {SAVED_BY}, got the sources a, c. {fix}"
    )
    assert refusal(plain(samples=96), source) == (
        f"data: expected the sources a, b, {SAVED_BY}, got one dataset without sources. {fix}"
    )
    assert refusal(mixture({"a": 32, "b": 64}), saved_by(mixture(), data=False)) == ""


def test_shards_of_other_sizes_are_refused() -> None:
    """Though there are as many samples: which of them are read together follows from the shards."""
    state = dict(order_state(make_job(mixture()).sample_order()))
    state["parts"] = {**state["parts"], "b": {"samples": 32, "shards": "0123456789abcdef"}}
    assert refusal(mixture(), saved_by(mixture(), order=state)) == (
        f"data: expected shards of b of the sizes that they had, {SAVED_BY}, got others. Positions in the data are "
        f"counted by it. {ANEW}"
    )


def test_a_run_of_the_first_order_takes_no_weights() -> None:
    """They would be ignored."""
    source = saved_by(plain(samples=96), order="none")
    assert refusal(mixture(a=1.0, b=2.0), source) == (
        f"data: expected a dataset without weights, {SAVED_BY}, whose order of version 1 knows none, got weights of a, "
        f"b. {ANEW}"
    )


SOUND: dict[str, Any] = {
    "version": 2,
    "parts": {"": {"samples": 96, "shards": ""}},
    "changes": [{"step": 1, "weights": {"": 96.0}}],
}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 3, "progress.order.version: expected a version from 1 to 2, got 3"),
        ("version", True, "progress.order.version: expected an integer, got true"),
        ("parts", [], r"progress.order.parts: expected an object, got \[\]"),
        ("parts", {"": {"samples": -1, "shards": ""}}, "samples: expected a whole number, got -1"),
        (
            "changes",
            [],
            r"progress.order.changes: expected weights from step 1 on, and others from later steps, got \[\]",
        ),
        ("changes", [{"step": 2, "weights": {"": 1.0}}], "changes: expected weights from step 1 on"),
        ("changes", [{"step": 1, "weights": {"": 0.0}}], "weights.: expected a finite number above 0, got 0.0"),
        ("changes", [{"step": 1, "weights": {"a": 1.0}}], "weights: expected weights of , got"),
        ("more", 1, "progress.order: expected only the keys version, parts, changes, got 'more'"),
    ],
)
def test_an_order_that_is_none_is_refused(key: str, value: Any, message: str) -> None:
    """By the checkpoint and the key."""
    assert SavedOrder.of(saved_by(plain(), order=SOUND)).changes[0].weights == {"": 96.0}
    with pytest.raises(CheckpointError, match=message):
        SavedOrder.of(saved_by(plain(), order={**SOUND, key: value}))
