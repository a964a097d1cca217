"""What an attempt under torchrun knows of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.trainer._attempt import Attempt, forget_others, last_attempt, note_begin, note_end

FIRST = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
SECOND = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}


def test_a_restart_knows_how_the_last_attempt_ended(tmp_path: Path) -> None:
    """Killed, it has only begun."""
    note_begin(tmp_path, FIRST)
    assert last_attempt(tmp_path, SECOND) == Attempt(job="a")
    note_end(tmp_path, 16, "rank 1: once more", FIRST)
    assert last_attempt(tmp_path, SECOND) == Attempt(job="a", code=16, text="rank 1: once more")
    assert [path.name for path in tmp_path.iterdir()] == ["attempt.json"]


@pytest.mark.parametrize(
    "environ",
    [{}, FIRST, {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1"}],
    ids=["by hand", "a first attempt", "another job", "requeued"],
)
def test_nothing_else_does(environ: dict[str, str], tmp_path: Path) -> None:
    """What an earlier job left says nothing of this one."""
    note_end(tmp_path, 16, "", FIRST)
    assert last_attempt(tmp_path, environ) is None


def test_a_first_attempt_forgets_earlier_jobs(tmp_path: Path) -> None:
    """Jobs of torchrun may share a name; so a first attempt that is refused is refused again."""
    note_end(tmp_path, 3, "", FIRST)
    forget_others(tmp_path, SECOND)
    assert last_attempt(tmp_path, SECOND) is not None
    forget_others(tmp_path, FIRST)
    assert last_attempt(tmp_path, SECOND) is None


def test_without_torchrun_nothing_is_noted(tmp_path: Path) -> None:
    """Nobody would read it."""
    note_begin(tmp_path, {})
    note_end(tmp_path, 3, "", {})
    note_end(None, 3, "", FIRST)
    assert list(tmp_path.iterdir()) == []
