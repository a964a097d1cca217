"""What is refused around a run: its directory, its world, its loggers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mimo.hooks import ConfigError
from mimo.trainer._config import make_settings
from mimo.trainer._preflight import check_directory, check_logging, check_world
from mimo.trainer._settings import Settings


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


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """It cannot be written into."""
    (tmp_path / "r").touch()
    with pytest.raises(ConfigError, match=r"^run.directory: expected a folder, got '.*r', which is a file"):
        check_directory(settings(tmp_path / "r"))


@pytest.mark.parametrize("trace", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_going_on_needs_a_run(tmp_path: Path, trace: str) -> None:
    """Otherwise a misspelled directory would begin one from nothing; whether it has saved anything is no matter."""
    with pytest.raises(
        ConfigError, match=r"^checkpoint.load: expected a run in '.*' to go on with, got none\. Check run"
    ):
        check_directory(settings(tmp_path, "latest"))
    (tmp_path / trace).mkdir()
    check_directory(settings(tmp_path, "latest"))


@pytest.mark.parametrize("text", ["", "[load]\n", "[checkpoint]\n"])
def test_going_on_needs_no_more_of_the_old_settings_than_is_there(text: str, tmp_path: Path) -> None:
    """Whoever wrote or emptied them by hand gets no traceback."""
    (tmp_path / "config.toml").write_text(text)
    check_directory(settings(tmp_path, "latest"))


def test_a_job_that_may_be_restarted_says_the_same_the_first_time(tmp_path: Path) -> None:
    """Under torchrun or Slurm going on begins a run where there is none."""
    check_directory(settings(tmp_path / "new", "latest"), joining=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run.directory: expected a folder, got '.*file', which is a file"):
        check_directory(settings(tmp_path / "file", "latest"), joining=True)


def test_a_checkpoint_folder_must_exist_and_be_of_this_run_to_go_on_in_its_directory(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"^logging.tensorboard: expected the package tensorboard to be installed"):
        check_logging(asked)
