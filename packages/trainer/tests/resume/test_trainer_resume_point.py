"""Which checkpoint a run begins with, and what of it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from mimo.checkpoint import save
from mimo.hooks import CheckpointError, Common, ConfigError
from mimo.model import DECODER
from mimo.trainer.config.settings import LoadSettings, Settings
from mimo.trainer.config.structure import unstructure
from mimo.trainer.config.toml import make_settings, override_key, write_config
from mimo.trainer.resolving.load import check_load
from mimo.trainer.resume.attempt import Attempt, last_attempt, note_begin
from mimo.trainer.resume.directory import check_directory
from mimo.trainer.resume.resume_point import Source, find_source, step_folder


def settings(directory: Path, load: str = "none", **keys: Any) -> Settings:
    """Return settings of a run in a directory, with keys of ``[load]``."""
    return make_settings(
        {
            "run": {"name": "r", "steps": 1, "global_batch": 1, "directory": str(directory)},
            "data": {"plugin": "jsonl"},
            "modules": {"language": {"plugin": "decoder", "ranks": "0"}},
            "checkpoint": {"load": load},
            "load": keys,
        }
    )


def save_run(directory: Path, step: int, by: Settings | None = None, **progress: int) -> Path:
    """Save a step as a run with such settings does, and return its folder."""
    began = {"schedule_begun": 0, "data_begun": 0, **progress}
    tree = {"progress": {key: Common(value) for key, value in began.items()}}
    config = {} if by is None else unstructure(by)
    return save(directory / "checkpoints", step, tree, config=config, topology={})


def begin(directory: Path, attempt: int) -> Attempt | None:
    """Begin an attempt of a job of torchrun as a run does, and return the one that it follows."""
    environ = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    last = last_attempt(directory, environ)
    directory.mkdir(exist_ok=True)
    note_begin(directory, environ)
    return last


@pytest.mark.parametrize(
    ("load", "keys", "expected"),
    [
        ("none", {}, None),
        ("latest", {}, ("own", 5, False)),
        ("other", {}, ("other", 10, False)),
        ("none", {"finetune": "other"}, ("other", 1, True)),
        ("latest", {"finetune": "other"}, ("own", 5, False)),
    ],
)
def test_settings_name_the_source(
    load: str, keys: dict[str, str], expected: tuple[str, int, bool] | None, tmp_path: Path
) -> None:
    """A run that has saved resumes its newest step under ``latest``; finetuning begins with the first step."""
    save_run(tmp_path / "own", 4)
    save_run(tmp_path / "other", 9)
    paths = {"none": "none", "latest": "latest", "other": str(tmp_path / "other")}
    found = find_source(settings(tmp_path / "own", paths[load], **{key: paths[one] for key, one in keys.items()}))
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.folder.parts[-3], found.first_step, found.finetunes) == expected


@pytest.mark.parametrize("load", ["none", "latest", "other"])
def test_a_restart_resumes_its_own_checkpoint(load: str, tmp_path: Path) -> None:
    """Whatever it began with; what it was to take of that was taken then. Without one it begins again as it did."""
    other = save_run(tmp_path / "other", 9)
    where = str(tmp_path / "other") if load == "other" else load
    keys: dict[str, Any] = {} if load == "other" else {"finetune": str(tmp_path / "other")}
    given = settings(tmp_path / "own", where, rename={"language": "text"}, **keys)
    for attempt in range(2):
        began = find_source(given, last=begin(tmp_path / "own", attempt))
        assert began is not None
        assert (began.folder, began.take, began.finetunes) == (other, given.load, load != "other")
    own = save_run(tmp_path / "own", 4, given)
    found = find_source(given, last=begin(tmp_path / "own", 2))
    assert found is not None
    assert (found.folder, found.take, found.finetunes) == (own, LoadSettings(), False)


def test_a_finetuned_run_resumes_all_of_its_own_checkpoint(tmp_path: Path) -> None:
    """What `[load]` says beside the checkpoint that it began with was for that one alone."""
    save_run(tmp_path, 4)
    found = find_source(settings(tmp_path, "latest", finetune="elsewhere", rename={"language": "text"}))
    assert found is not None
    assert (found.take, found.finetunes, found.first_step) == (LoadSettings(), False, 5)


def test_what_load_says_is_done_once(tmp_path: Path) -> None:
    """A restart does not drop states again that its job has saved; those that an earlier one has saved, it does."""
    given = settings(tmp_path, "latest", optimizer=False)
    for step, attempt, taken in ((4, 0, False), (4, 1, False), (5, 2, True), (6, 3, True)):
        save_run(tmp_path, step, given)
        found = find_source(given, last=begin(tmp_path, attempt))
        assert found is not None
        assert (found.manifest.step, found.take.optimizer) == (step, taken)


@pytest.mark.parametrize("again", [3, 6])
def test_a_restart_goes_back_again_until_its_job_has_saved(again: int, tmp_path: Path) -> None:
    """What lay in its directory beside the step that it goes back to was given up; a step may be saved over it."""
    for step in (2, 4, 6):
        save_run(tmp_path, step, settings(tmp_path))
    back = str(tmp_path / "checkpoints" / "step_00000002")
    given = settings(tmp_path, back)
    for attempt in range(3):
        found = find_source(given, last=begin(tmp_path, attempt))
        assert found is not None
        assert str(found.folder) == back
    save_run(tmp_path, again, given)
    found = find_source(given, last=begin(tmp_path, 3))
    assert found is not None
    assert (found.manifest.step, found.folder.name) == (again, f"step_{again:08}")


@pytest.mark.parametrize(
    ("checkpoint", "has"),
    [({}, True), ({"optimizer": True}, True), ({"optimizer": False}, False), ([1], True), ({"optimizer": 0}, True)],
)
def test_a_checkpoint_is_without_optimizer_states_where_its_settings_say_so(
    checkpoint: Any, has: bool, tmp_path: Path
) -> None:
    """What somebody else has written there is no such setting, and ends nothing."""
    folder = save(tmp_path, 1, {"a": torch.ones(1)}, config={"checkpoint": checkpoint}, topology={})
    assert Source.of(folder, LoadSettings()).has_optimizer is has


def test_schedule_and_data_began_where_the_checkpoint_says_or_begin_now(tmp_path: Path) -> None:
    """Finetuning begins both with the first step; a checkpoint that no run has saved has no such steps."""
    folder = save_run(tmp_path, 8, schedule_begun=3, data_begun=5)
    whole, anew = Source.of(folder, LoadSettings()), Source.of(folder, LoadSettings(schedule=False, data=False))
    finetuned = Source.of(folder, LoadSettings(), finetunes=True)
    assert [(one.schedule_begun, one.data_begun) for one in (whole, anew, finetuned)] == [(3, 5), (8, 8), (0, 0)]
    foreign = save(tmp_path / "foreign", 8, {"a": Common(1)}, config={}, topology={})
    with pytest.raises(
        CheckpointError, match=r"got one without progress\.data_begun\. Its weights can begin a new run"
    ):
        _ = Source.of(foreign, LoadSettings()).data_begun


@pytest.mark.parametrize(
    ("plugin", "frozen", "trained"),
    [
        ("two", True, False),
        ("two", False, True),
        ("two", [], True),
        ("two", ["left"], True),
        ("two", ["left", "right"], False),
        ("two", ["left", "gone"], True),
        ("other", ["left", "right"], True),
    ],
)
def test_a_module_frozen_part_by_part_was_not_trained(
    plugin: str, frozen: bool | list[str], trained: bool, tmp_path: Path
) -> None:
    """As one that was frozen whole; of plugins that this run hasn't, nobody knows the parts."""
    spec = attrs.evolve(DECODER, name="two", parts={"left": ("a", "b"), "right": ("c",)})
    tree = {"eye": {"a": {"weight": torch.ones(1)}, "c": torch.ones(1)}, "eyes": {"d": torch.ones(1)}}
    config = {"modules": {"eye": {"plugin": plugin, "frozen": frozen}}}
    source = Source.of(save(tmp_path, 1, tree, config=config, topology={}), LoadSettings())
    assert source.trained([DECODER, spec]) == ({"eye"} if trained else set())


def test_steps_of_which_none_is_whole_are_no_beginning(tmp_path: Path) -> None:
    """They are not begun over."""
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert find_source(settings(tmp_path)) is None
    with pytest.raises(CheckpointError, match="got no complete checkpoint there"):
        find_source(settings(tmp_path, "latest"))


@pytest.mark.parametrize(
    ("name", "files", "fix"),
    [
        ("absent", None, "Check the path: nothing is there."),
        ("empty", [], "got no complete checkpoint there."),
        ("llama", ["config.json"], "`mimo checkpoint import-hf llama --out DIR` makes one of a published folder."),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused_with_what_to_do(
    name: str, files: list[str] | None, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt path and a published folder get different messages."""
    monkeypatch.chdir(tmp_path)
    if files is not None:
        Path(name).mkdir()
        for file in files:
            (Path(name) / file).touch()
    with pytest.raises(CheckpointError) as caught:
        step_folder(Path(name))
    assert str(caught.value).endswith(fix)


NOTHING_LOADED = (
    "expected nothing, as no checkpoint is loaded: checkpoint.load is none, got {}. Set checkpoint.load or "
    "load.finetune, or leave it out."
)
TWO_BEGINNINGS = (
    "load.finetune: expected nothing beside checkpoint.load, which names another checkpoint to begin with, got 'x'. "
    'Leave one of them out: on the command line, load.finetune="" or checkpoint.load=none does so.'
)


@pytest.mark.parametrize(
    ("override", "load", "text"),
    [
        ("load.optimizer=false", "none", f"load.optimizer: {NOTHING_LOADED.format(False)}"),
        ("load.may_lack=['a']", "none", f"load.may_lack: {NOTHING_LOADED.format(['a'])}"),
        ("load.rename.a=b", "none", f"load.rename: {NOTHING_LOADED.format({'a': 'b'})}"),
        (
            "load.rename.a=''",
            "latest",
            "load.rename: expected prefixes of names, or with load.finetune '' for what begins new, got 'a' = ''.",
        ),
        ("load.finetune=x", "y", TWO_BEGINNINGS),
    ],
)
def test_settings_that_nothing_would_come_of_are_refused(override: str, load: str, text: str, tmp_path: Path) -> None:
    """By the path of the key."""
    table = override_key(unstructure(settings(tmp_path, load)), override)
    with pytest.raises(ConfigError) as error:
        check_load(make_settings(table))
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("override", "left"),
    [('load.finetune=""', ("y", "")), ("load.finetune=", ("y", "")), ("checkpoint.load=none", ("none", "x"))],
)
def test_a_written_beginning_is_left_out_by_an_override(override: str, left: tuple[str, str], tmp_path: Path) -> None:
    """As the refusal of two says; a shell takes the quotes away."""
    given = make_settings(override_key(unstructure(settings(tmp_path, "y", finetune="x")), override))
    check_load(given)
    assert (given.checkpoint.load, given.load.finetune) == left


@pytest.mark.parametrize("key", ["optimizer", "rng", "schedule", "data"])
def test_finetuning_has_nothing_to_leave_but_weights(key: str, tmp_path: Path) -> None:
    """So that nobody thinks that the other three were taken."""
    keys: dict[str, Any] = {"finetune": "x", key: False}
    with pytest.raises(ConfigError) as error:
        check_load(settings(tmp_path, **keys))
    text = f"load.{key}: expected true, as load.finetune takes weights alone, got false. Leave it out."
    assert str(error.value) == text
    check_load(settings(tmp_path, "latest", finetune="x", may_lack=["a"]))


def test_a_run_is_not_begun_again_without_what_it_began_with(tmp_path: Path) -> None:
    """It would begin with other weights, silently. Once it has saved some, it resumes with those."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    write_config(unstructure(settings(run, finetune=str(other))), run / "config.toml")
    check_directory(settings(run, "latest", finetune=str(other)))
    with pytest.raises(ConfigError, match=r"^load\.finetune: .*other', with which the run in .* own: remove the dir"):
        check_directory(settings(run, "latest"))
    save_run(run, 1)
    check_directory(settings(run, "latest"))
    (run / "checkpoints" / "step_00000001").rename(run / "checkpoints" / ".step_00000001.replaced-0123abcd")
    check_directory(settings(run, "latest"))
    with pytest.raises(ConfigError, match=r"got '.*'\. Leave it out to go on with the run\.$"):
        check_directory(settings(run, "latest", finetune=str(tmp_path)))

    write_config(unstructure(settings(other, str(run))), other / "config.toml")
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: expected '.*run', with which .* own: remove the dir"):
        check_directory(settings(other, "latest"))
    save_run(other, 1)
    check_directory(settings(other, "latest"))


def test_a_restart_resumes_in_its_directory(tmp_path: Path) -> None:
    """Where a first attempt would be refused."""
    write_config(unstructure(settings(tmp_path)), tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"^run\.directory: expected a directory without a run in it"):
        check_directory(settings(tmp_path), joining=True)
    check_directory(settings(tmp_path), joining=True, restarted=True)
    check_directory(settings(tmp_path, str(tmp_path / "checkpoints" / "deleted")), joining=True, restarted=True)
    with pytest.raises(ConfigError, match=r"^load\.finetune: expected the folder of a checkpoint or of a run, got 'x'"):
        check_directory(settings(tmp_path / "new", finetune="x"))
