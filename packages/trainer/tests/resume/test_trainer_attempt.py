"""What an attempt under torchrun knows of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint import save
from mimo.hooks import Common
from mimo.trainer.resume.attempt import Attempt, forget_others, last_attempt, note_begin, note_end

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
    [
        {},
        FIRST,
        {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "a"},
        {**SECOND, "SLURM_JOB_ID": "7"},
    ],
    ids=["by hand", "a first attempt", "another job", "by hand in a requeued job", "another job of Slurm"],
)
def test_nothing_else_does(environ: dict[str, str], tmp_path: Path) -> None:
    """What an earlier job left says nothing of this one."""
    note_end(tmp_path, 16, "", FIRST)
    assert last_attempt(tmp_path, environ) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": "a", "unknown": 1}'])
def test_a_note_that_cannot_be_read_says_nothing(text: str, tmp_path: Path) -> None:
    """A power cut may leave an empty one."""
    (tmp_path / "attempt.json").write_text(text)
    assert last_attempt(tmp_path, SECOND) is None


def test_a_first_attempt_forgets_earlier_jobs(tmp_path: Path) -> None:
    """Jobs of torchrun may share a name; so a first attempt that is refused is refused again."""
    note_end(tmp_path, 3, "", FIRST)
    forget_others(tmp_path, SECOND)
    assert last_attempt(tmp_path, SECOND) is not None
    forget_others(tmp_path, FIRST)
    assert last_attempt(tmp_path, SECOND) is None


@pytest.mark.parametrize("through", [{}, FIRST], ids=["srun", "torchrun"])
def test_what_slurm_starts_again_is_a_restart(through: dict[str, str], tmp_path: Path) -> None:
    """Its number stays, torchrun's name and count don't; it may be on other machines, so that no code is final."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "7", **through}
    forget_others(tmp_path, job)
    note_begin(tmp_path, job)
    note_end(tmp_path, 16, "", job)
    again = {**job, "SLURM_RESTART_COUNT": "1", **({"TORCHELASTIC_RUN_ID": "other"} if through else {})}
    forget_others(tmp_path, again)
    last = last_attempt(tmp_path, again)
    assert last == Attempt(job="7", code=16)
    assert not last.is_final(again)
    note_end(tmp_path, 16, "", again)
    last = last_attempt(tmp_path, again)
    assert last is not None
    assert last.is_final(again)


def test_an_attempt_that_ends_before_it_begins_knows_what_lay_there(tmp_path: Path) -> None:
    """Whoever writes first for a job finds it out, and all others keep it."""
    save(tmp_path / "checkpoints", 1, {"a": Common(1)}, config={}, topology={})
    note_end(tmp_path, 3, "", FIRST)
    note_begin(tmp_path, SECOND)
    last = last_attempt(tmp_path, SECOND)
    assert last is not None
    assert (last.code, last.has_saved(tmp_path)) == (None, False)
    save(tmp_path / "checkpoints", 2, {"a": Common(1)}, config={}, topology={})
    note_end(tmp_path, 3, "", SECOND)
    assert [one.has_saved(tmp_path) for one in (last, last_attempt(tmp_path, SECOND)) if one is not None] == [
        True,
        True,
    ]


def test_without_torchrun_nothing_is_noted(tmp_path: Path) -> None:
    """Nobody would read it."""
    note_begin(tmp_path, {})
    note_end(tmp_path, 3, "", {})
    assert list(tmp_path.iterdir()) == []
