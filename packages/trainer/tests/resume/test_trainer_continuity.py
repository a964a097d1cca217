"""Settings of a run beside those of the checkpoint that it resumes: what is refused, and which differences it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from eye import Table, make_job, on, table

from mimo.checkpoint import Manifest, OwnedEntry
from mimo.hooks import ConfigError
from mimo.trainer.config.settings import LoadSettings
from mimo.trainer.resume.compatibility import check_source, differences, optimizer_settings, with_balance
from mimo.trainer.resume.resume_point import Source

BOTH = {"vision": on(0, 0), "language": on(0, 0)}
FOLDER = Path("run/checkpoints/step_00000003")


def settings(modules: Mapping[str, Mapping[str, Any]] | None = None, **sections: Mapping[str, Any]) -> Table:
    """Return the settings of a run of ten steps, with keys of its sections."""
    return table(BOTH if modules is None else modules, **sections)


def saved_by(before: Table, *, finetunes: bool = False, **take: Any) -> Source:
    """Return the third step of a run with such settings."""
    job = make_job(before)
    run = job.settings.run
    assert job.train is not None
    progress = {"seed": run.seed, "global_batch": run.global_batch, "samples": len(job.train)}
    manifest = Manifest(
        step=3,
        block_bytes=1,
        tensors={},
        shards={},
        common={f"progress.{key}": value for key, value in {**progress, "schedule_begun": 0, "data_begun": 0}.items()},
        owned={
            f"settings.{module.name}": OwnedEntry(module=module.name, value=optimizer_settings(module))
            for module in job.modules
        },
        topology={module.name: {} for module in job.modules},
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


def test_any_layout_can_resume() -> None:
    """With the same settings or other ranks, schedules and microbatches nothing is refused, and nothing differs."""
    other = settings({"vision": on(0, 1, pp=2), "language": on(2, 5, tp=2, pp=2)}, schedule={"plugin": "gpipe"})
    other["run"] |= {"micro_batch": 3, "name": "other", "steps": 20}
    source = saved_by(settings())
    assert [refusal(now, source) for now in (settings(), other)] == ["", ""]
    assert [*differences(make_job(settings()), source), *differences(make_job(other), source)] == []
    spread, wider = (settings(optimizer={"plugin": "spread", "shard": shard}) for shard in ("optimizer", "full"))
    assert list(differences(make_job(wider), saved_by(spread))) == []


SEED = (
    f"run.seed: expected 5, as in the run that '{FOLDER}' was saved by, got 6. The order of samples follows from it. "
    "Set it so, or load.rng = false to go on with another."
)
BATCH = (
    f"run.global_batch: expected 24, as in the run that '{FOLDER}' was saved by, got 48. Positions in the data are "
    "counted by it. Set load.data = false to begin with the data anew. micro_batch may change freely."
)


@pytest.mark.parametrize(("key", "run", "text"), [("rng", {"seed": 6}, SEED), ("data", {"global_batch": 48}, BATCH)])
def test_what_the_place_of_a_run_follows_from_is_refused(key: str, run: Mapping[str, int], text: str) -> None:
    """Unless settings say that it is not taken."""
    now, before = settings(run=run), settings()
    assert refusal(now, saved_by(before)) == text
    assert refusal(now, saved_by(before, **{key: False})) == ""
    assert refusal(now, saved_by(before, finetunes=True)) == ""


def test_a_schedule_that_begins_anew_must_have_steps_left() -> None:
    """Warm-up counts from where it begins, and the end is a step of the run."""
    text = (
        "modules.language.optimizer.lr_decay_steps: expected more than 3 steps before it began + lr_warmup_steps = 8, "
        "got 8. It is the step at which lr_min is reached; 0 is run.steps."
    )
    rates = {"lr_schedule": "linear", "lr_warmup_steps": 5, "lr_decay_steps": 8}
    now = settings({"language": on(0, 0)}, optimizer=rates)
    assert refusal(now, saved_by(now, schedule=False)) == text
    assert refusal(now, saved_by(now)) == ""


def test_a_dataset_of_another_size_is_refused() -> None:
    """Its samples would come in another order."""
    source = saved_by(settings())
    common = {**source.manifest.common, "progress.samples": 95}
    shorter = attrs.evolve(source, manifest=attrs.evolve(source.manifest, common=common))
    assert refusal(settings(), shorter) == (
        f"data: expected 95 samples, as in the run that '{FOLDER}' was saved by, got 96. Positions in the data are "
        "counted by it. Set load.data = false to begin with the data anew."
    )


def test_all_that_is_wrong_is_refused_at_once() -> None:
    """Modules that are new or gone too, with what to do."""
    now = settings({"glyph": on(0, 0), "language": on(0, 0)}, run={"seed": 6, "global_batch": 48})
    new = (
        f"modules.glyph: expected a module of '{FOLDER}', which has language, vision, got a new one. "
        'Add "glyph.*" to load.may_lack to begin it with its initial weights, or name it in load.rename if it is '
        "called otherwise there."
    )
    gone = (
        f"modules.vision: expected a module, as '{FOLDER}' has one of this name, got none. "
        'Add "vision.*" to load.may_leave to go on without it, or name it in load.rename if it is called otherwise '
        "here."
    )
    lines = "".join(f"\n  {line}" for line in (new, gone, SEED, BATCH))
    text = f"settings: expected ones that go with {FOLDER}, got 4 that don't:{lines}"
    assert refusal(now, saved_by(settings())) == text


def test_a_renamed_module_is_neither_new_nor_gone() -> None:
    """By itself; and what settings allow for isn't refused."""
    now = settings({"glyph": on(0, 0), "language": on(0, 0)})
    assert refusal(now, saved_by(settings(), rename={"glyph": "vision"})) == ""
    assert refusal(now, saved_by(settings(), may_lack=("glyph.*",), may_leave=("vision*",))) == ""
    assert refusal(now, saved_by(settings(), may_lack=("glyph.projector.*",), may_leave=("vision*",))) != ""
    assert refusal(now, saved_by(settings(), finetunes=True)) == ""


def test_finetuning_needs_a_module_in_common() -> None:
    """Else nothing would be loaded."""
    source = saved_by(settings(), finetunes=True)
    other = attrs.evolve(source, manifest=attrs.evolve(source.manifest, topology={"text": {}}))
    assert refusal(settings(), other) == (
        "load.finetune: expected a checkpoint with any of vision, language, got one with text. If they are called "
        'otherwise there, set load.rename: vision = "encoder".'
    )


def test_differing_settings_from_which_results_follow_are_named() -> None:
    """What each module's optimizer follows, with what it inherits and what follows from run.steps; the data; layers."""
    before = settings(optimizer={"lr_schedule": "linear"})
    now = settings(optimizer={"lr_schedule": "linear", "lr": 3e-3, "patterns": {"*.bias": {"weight_decay": 0.0}}})
    now["run"]["steps"] = 20
    now["data"]["text"] = 9
    now["modules"]["vision"] = {**now["modules"]["vision"], "optimizer": {"weight_decay": 0.2}}
    config = {**now["modules"]["language"]["config"], "rope_theta": 500.0}
    now["modules"]["language"] = {**now["modules"]["language"], "config": config}
    reported = list(differences(make_job(now), saved_by(before)))
    assert reported[:2] == ["modules.language.config.rope_theta 500.0 (was 10000.0)", "data.text 9 (was 8)"]
    assert "optimizer of vision.weight_decay 0.2 (was 0.1)" in reported
    assert "optimizer of vision.lr 0.003 (was 0.001)" in reported
    assert "optimizer of language.lr_decay_steps 20 (was 10)" in reported
    assert any(one.startswith('optimizer of language.optimizer.patterns."*.bias" {') for one in reported)
    assert list(differences(make_job(now), saved_by(before, finetunes=True))) == reported[:1]


def test_what_a_checkpoint_does_not_say_is_what_was_done_then() -> None:
    """A key that its plugin has had since then has its default; what it fed is compared however it is written."""
    job, config = make_job(settings()), json.loads(json.dumps(make_job(settings()).plain))
    del config["modules"]["language"]["config"]["hidden_dropout"], config["modules"]["vision"]["feeds"]
    source = saved_by(settings())
    older = attrs.evolve(source, manifest=attrs.evolve(source.manifest, config=config))
    assert list(differences(job, older)) == []
    config["modules"]["vision"]["feeds"] = ["language", "drawer"]
    config["modules"]["language"]["config"]["hidden_dropout"] = 0.1
    assert list(differences(job, older)) == [
        "modules.vision.feeds ['language'] (was ['language', 'drawer'])",
        "modules.language.config.hidden_dropout 0.0 (was 0.1)",
    ]


def test_a_module_that_is_split_off_is_neither_new_nor_gone() -> None:
    """Where a part of it is renamed, which of its names the checkpoint has is found out at loading."""
    now, before = settings({"glyph": on(0, 0), "language": on(0, 0)}), settings({"language": on(0, 0)})
    assert refusal(now, saved_by(before)).startswith("modules.glyph: expected a module")
    assert refusal(now, saved_by(before, rename={"glyph.projector": "language.projector"})) == ""
    assert refusal(before, saved_by(now, rename={"language.projector": "glyph.projector"})) == ""


def test_a_teacher_has_learned_by_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    """By its settings, files by what they hold; nothing is known of a file that is gone, nor of the student's."""
    words = [f"word{number}" for number in range(20)]
    for name, listed in (("one", words), ("same", words), ("other", words[::-1])):
        (tmp_path / name).write_text("\n".join(listed), encoding="utf-8")

    def by(tokenizer: Mapping[str, Any]) -> Table:
        found = table({"language": on(0, 0)})
        found["modules"]["teacher"] = {**found["modules"]["language"], "distil": {"top_k": 2}}
        return {**found, "tokenizer": {"plugin": "word", **tokenizer}}

    def refused(before: Table, now: Table, **take: Any) -> str:
        source = saved_by(before, finetunes=True, **take)
        return refusal(now, source)

    text = (
        "modules.teacher: expected a teacher by the tokenizer of this run, as both read and write the same ids, got "
        "that of 'run/checkpoints/step_00000003', where tokenizer.{} was another. Set the tokenizer as it was there, "
        "or take another teacher."
    )
    assert refused(by({"words": words}), by({"words": words})) == ""
    assert refused(by({"words": words}), by({"words": words[::-1]})) == text.format("words")
    files = {name: by({"file": str(tmp_path / name)}) for name in ("one", "same", "other")}
    assert refused(files["one"], files["same"]) == ""
    assert refused(files["one"], files["other"]) == text.format("file")
    source = saved_by(files["one"], finetunes=True)
    (tmp_path / "one").unlink()
    assert refusal(files["other"], source) == ""
    new = {"rename": {"teacher": ""}}
    assert refused(by({"words": words}), by({"words": words[::-1]}), **new) == ""


def test_a_checkpoint_without_settings_differs_in_nothing() -> None:
    """One that was saved from Python says of none how it was."""
    source = saved_by(settings())
    bare = attrs.evolve(source, manifest=attrs.evolve(source.manifest, config={}))
    assert list(differences(make_job(settings()), bare)) == []
    assert source.trained([]) == {"vision", "language"}
    assert not bare.trained([])


def test_samples_are_placed_as_in_the_run_that_is_resumed() -> None:
    """By cost, by count where the run was or has never said, and always as the settings say if they do."""

    def resumed(now: Table, source: Source | None) -> tuple[str, str]:
        job = with_balance(make_job(now), source)
        return job.balance, job.plain["data"]["balance"]

    silent, by_cost, by_count = settings(), settings(), settings()
    by_cost["data"]["balance"], by_count["data"]["balance"] = "cost", "count"
    config = {**make_job(silent).plain}
    config["data"] = {key: value for key, value in config["data"].items() if key != "balance"}
    source = saved_by(silent)
    older = attrs.evolve(source, manifest=attrs.evolve(source.manifest, config=config))
    assert resumed(silent, None) == ("cost", "cost")
    assert resumed(silent, source) == ("cost", "cost")
    assert resumed(silent, saved_by(by_count)) == ("count", "count")
    assert resumed(silent, older) == ("count", "count")
    assert resumed(silent, attrs.evolve(older, finetunes=True)) == ("cost", "cost")
    assert resumed(by_cost, older) == ("cost", "cost")
    assert list(differences(make_job(by_count), older)) == []


def test_more_samples_than_can_be_read_first_are_placed_by_count() -> None:
    """Each rank would read the headers of all of a step; who asks for it is refused."""
    many = settings()
    many["run"]["global_batch"] = many["run"]["micro_batch"] = 1 << 17
    assert make_job(many).balance == "count"
    many["data"]["balance"] = "cost"
    with pytest.raises(
        ConfigError, match=r"data\.balance: expected 'count', or data with an index, .* above 65536: .* got 'cost'"
    ):
        make_job(many)
