"""What is refused around a run: its directory, its world, its loggers."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import pytest

from mimo.hooks import ConfigError, ResultRejectedError
from mimo.launch import check_unlocked, take_lock
from mimo.trainer.config.settings import Settings
from mimo.trainer.config.toml import make_settings
from mimo.trainer.resume.attempt import note_end
from mimo.trainer.resume.directory import check_directory, check_logging, check_world, holds_run
from mimo.trainer.run.begin import enter_directory, resolve_run


def settings(directory: Path, load: str = "none") -> Settings:
    """Return settings of a run in a directory."""
    return make_settings(
        {
            "run": {"name": "r", "steps": 1, "global_batch": 1, "directory": str(directory)},
            "data": {"plugin": "jsonl"},
            "modules": {"language": {"plugin": "decoder", "ranks": "0"}},
            "checkpoint": {"load": load},
        }
    )


@pytest.mark.parametrize("trace", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_a_directory_with_a_run_in_it_is_refused(tmp_path: Path, trace: str) -> None:
    """Nothing is ever overwritten."""
    check_directory(settings(tmp_path))
    (tmp_path / trace).mkdir()
    with pytest.raises(
        ConfigError, match=r"^run.directory: expected a directory without a run .* checkpoint.load=latest"
    ):
        check_directory(settings(tmp_path))


def test_a_run_that_ended_before_its_first_step_hinders_no_other(tmp_path: Path) -> None:
    """Its settings, plan, lock and logs are no loss. Metrics of a step and checkpoints are, be they partial ones."""
    for name in ("plan.json", "config.toml", "error.txt", "run.lock", "metrics.jsonl"):
        (tmp_path / name).touch()
    run = settings(tmp_path)
    enter_directory(run, {}).release()
    check_directory(settings(tmp_path, "latest"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"^run.directory: expected a directory without a run in it"):
        enter_directory(run, {})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / ".step_00000001.partial-0123abcd").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^run.directory: expected a directory without a run in it"):
        enter_directory(run, {})


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """It cannot be written into."""
    (tmp_path / "r").touch()
    with pytest.raises(ConfigError, match=r"^run.directory: expected a folder, got '.*r', which is a file"):
        check_directory(settings(tmp_path / "r"))


def test_a_directory_that_cannot_be_searched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can see whether another user's directory holds a run."""

    def refuse(path: str | Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(
        ConfigError, match=r"^run.directory: expected a folder that can be made and written, .*: Permission denied\."
    ):
        check_directory(settings(tmp_path))


def test_a_command_that_is_typed_twice_names_the_run_that_lives(tmp_path: Path) -> None:
    """Not to remove its directory. A job that is restarted waits for its predecessor."""
    run, joined = settings(tmp_path), {"RANK": "0", "WORLD_SIZE": "1"}
    for is_alive in (True, False):
        with take_lock(tmp_path, seconds=0) as lock:
            (tmp_path / "config.toml").touch()
            if not is_alive:
                lock.release()
            for environ in ({}, joined):
                said = (
                    rf"held by process {os.getpid()} on " if is_alive and not environ else "a directory without a run"
                )
                with pytest.raises(ConfigError, match=rf"^run.directory: expected .*{said}"):
                    resolve_run(run, environ)


@pytest.mark.parametrize("trace", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_resuming_needs_a_run(tmp_path: Path, trace: str) -> None:
    """Otherwise a misspelled directory would begin one from nothing; whether it has saved anything is no matter."""
    with pytest.raises(
        ConfigError, match=r"^checkpoint.load: expected a run in '.*' to go on with, got none\. Check run"
    ):
        check_directory(settings(tmp_path, "latest"))
    (tmp_path / trace).mkdir()
    check_directory(settings(tmp_path, "latest"))


@pytest.mark.parametrize("text", ["", "[load]\n", "[checkpoint]\n"])
def test_resuming_needs_no_more_of_the_old_settings_than_is_there(text: str, tmp_path: Path) -> None:
    """Whoever wrote or emptied them by hand gets no traceback."""
    (tmp_path / "config.toml").write_text(text)
    check_directory(settings(tmp_path, "latest"))


def test_a_job_that_may_be_restarted_says_the_same_the_first_time(tmp_path: Path) -> None:
    """Under torchrun or Slurm `resume` begins a run where there is none."""
    check_directory(settings(tmp_path / "new", "latest"), joining=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run.directory: expected a folder, got '.*file', which is a file"):
        check_directory(settings(tmp_path / "file", "latest"), joining=True)


def test_a_checkpoint_folder_must_exist_and_be_of_this_run_to_resume_in_its_directory(tmp_path: Path) -> None:
    """A checkpoint of another run begins a new one, for which the directory must be free."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for run in (mine, other):
        (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    check_directory(settings(mine, str(mine / "checkpoints" / "step_00000001")))
    check_directory(settings(tmp_path / "new", str(other / "checkpoints" / "step_00000001")))
    with pytest.raises(ConfigError, match=r"^run.directory: expected a directory without a run"):
        check_directory(settings(mine, str(other / "checkpoints" / "step_00000001")))
    with pytest.raises(ConfigError, match=r'^checkpoint.load: expected "none", "latest" or the folder of a checkpoint'):
        check_directory(settings(mine, "lastest"))
    with pytest.raises(ConfigError, match=r"^checkpoint.load: expected"):
        check_directory(settings(mine, "x" * 300))


def test_the_directory_is_read_again_after_the_lock_is_taken(tmp_path: Path) -> None:
    """Two runs may both have found a free directory; who takes it second has to look again, and lets it go."""
    run = settings(tmp_path / "run")
    check_directory(run)
    with enter_directory(run, {}):
        (tmp_path / "run" / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"^run.directory: expected a directory without a run in it"):
        enter_directory(run, {})
    check_unlocked(tmp_path / "run")


def test_a_directory_that_was_only_taken_holds_no_run(tmp_path: Path) -> None:
    """Its lock file stays, and hinders no other run."""
    enter_directory(settings(tmp_path), {}).release()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    assert not holds_run(tmp_path)
    check_directory(settings(tmp_path))
    with pytest.raises(ConfigError, match=r"^checkpoint.load: expected a run in '.*' to go on with, got none"):
        check_directory(settings(tmp_path, "latest"))


def test_what_earlier_jobs_left_is_removed_by_whoever_holds_the_directory(tmp_path: Path) -> None:
    """And by nobody before."""
    job = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    (tmp_path / "attempt.json").touch()
    with enter_directory(settings(tmp_path), {}):
        assert (tmp_path / "attempt.json").exists()
        with pytest.raises(ConfigError, match="into which no other run writes"):
            enter_directory(settings(tmp_path), job)
        assert (tmp_path / "attempt.json").exists()
    enter_directory(settings(tmp_path), job).release()
    assert not (tmp_path / "attempt.json").exists()


def test_a_restart_that_waited_asks_how_its_predecessor_ended(tmp_path: Path) -> None:
    """It may have ended so that no restart can help, after this one had looked first."""
    job = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}
    note_end(tmp_path, 17, "rank 0: no", job)
    with pytest.raises(ResultRejectedError, match=r"^not begun again: .* got one that ended with 17:\nrank 0: no$"):
        enter_directory(settings(tmp_path), job)
    check_unlocked(tmp_path)


def test_a_world_other_than_torchruns_is_refused() -> None:
    """Before anybody waits for a rank that does not exist."""
    check_world(4, {"RANK": "0", "WORLD_SIZE": "4"})
    check_world(4, {})
    with pytest.raises(ConfigError, match=r"^run.world: expected 2, the number of processes that were started, got 4"):
        check_world(4, {"RANK": "0", "WORLD_SIZE": "2"})


def test_tensorboard_must_be_installed_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not found out after the first step."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_logging(settings(tmp_path))
    table = {"console": True, "tensorboard": True}
    asked = make_settings(
        {
            "run": {"name": "r", "steps": 1, "global_batch": 1},
            "data": {"plugin": "jsonl"},
            "modules": {},
            "logging": table,
        }
    )
    with pytest.raises(ConfigError, match=r"^logging.tensorboard: expected the plugin mimo-logger-tensorboard to be"):
        check_logging(asked)
