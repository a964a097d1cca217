"""Commands that add to the checkpoints of a run: they hold its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.hooks import ConfigError
from mimo.launch import take_lock
from mimo.trainer.run import begin
from mimo.trainer.run.begin import written_into

HELD = r"^run\.directory: expected a folder into which no other run writes, got "


def is_free(directory: Path, *, seconds: float = 0) -> bool:
    """Return whether a run could take the directory now, or soon: a program closes files while it begins."""
    try:
        take_lock(directory, seconds=seconds).release()
    except ConfigError as error:
        return "which is held by" not in str(error)
    return True


@pytest.mark.parametrize("target", ["checkpoints", "checkpoints/step_00000001", "checkpoints/a/b", "../link"])
def test_nothing_is_added_to_the_checkpoints_of_a_run_that_lives(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the folder of all steps is named or one in it, by whatever way; another one is nobody's."""
    monkeypatch.setattr(begin, "_GRACE_SECONDS", 0.0)  # in which the run might end
    run = tmp_path / "run"
    with take_lock(run, seconds=0):
        (run / "checkpoints").mkdir()
        (tmp_path / "link").symlink_to(run / "checkpoints")
        with pytest.raises(ConfigError, match=HELD), written_into(run / target):
            pass
        with written_into(run / "beside"):
            pass
    with written_into(run / target):
        assert not is_free(run)
    assert is_free(run)


def test_a_folder_that_is_named_as_checkpoints_are_makes_no_run_of_the_one_around_it(tmp_path: Path) -> None:
    """Nothing is written beside it."""
    (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
    with written_into(tmp_path / "checkpoints" / "mine" / "new"):
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
