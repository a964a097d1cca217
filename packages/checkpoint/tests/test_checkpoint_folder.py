"""The folder of steps: commit, latest, keep, replacement, and what dead saves leave behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import WriteError, _folder, latest, load, mark_needed, name_step, save, verify
from mimo.checkpoint._writer import sync_folder
from mimo.hooks import CheckpointError, Common

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}


def save_step(folder: Path, step: int, value: float | None = None, **more: Any) -> Path:
    """Save one tensor that holds the step, or another value."""
    return save(folder, step, {"x": torch.full((4,), float(step if value is None else value))}, **ABOUT, **more)


def read_value(step: Path) -> float:
    """Load that tensor."""
    target = torch.zeros(4)
    load(step, {"x": target})
    return target[0].item()


def names(folder: Path) -> list[str]:
    """List a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_latest_of_nothing_is_none(tmp_path: Path) -> None:
    """A missing and an empty folder hold no checkpoint."""
    assert latest(tmp_path / "missing") is None
    assert latest(tmp_path) is None


def test_latest_follows_each_save(tmp_path: Path) -> None:
    """After each save `latest` is that step."""
    for step in (1, 2, 123_456_789):
        assert latest(save_step(tmp_path, step).parent) == tmp_path / name_step(step)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002", "step_123456789"]


def test_latest_is_what_was_saved_last_even_below_an_older_step(tmp_path: Path) -> None:
    """A run that went back to an earlier step resumes from its own checkpoint."""
    for step in (5, 9, 6):
        save_step(tmp_path, step)
    assert latest(tmp_path) == tmp_path / "step_00000006"


@pytest.mark.parametrize(
    "content", [None, b"", b"step_00000007\n", b"../step_00000001", b"\xff\xfe", b"step_1", b"x" * 999]
)
def test_latest_falls_back_to_the_highest_committed_step(tmp_path: Path, content: bytes | None) -> None:
    """A `latest` that is missing, damaged or names nothing committed is not followed."""
    for step in (1, 3, 2):
        save_step(tmp_path, step)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    (tmp_path / "step_00000009").mkdir()
    (tmp_path / ".step_00000008.partial-00000000").mkdir()
    (tmp_path / ".step_00000008.partial-00000000" / "manifest.json").write_text("{}")
    assert latest(tmp_path) == tmp_path / "step_00000003"


def test_a_failed_rename_leaves_the_old_checkpoint_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the commit fails, the error is raised, nothing new is visible, and the next save works."""
    save_step(tmp_path, 1)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(
            CheckpointError, match=r"step_00000002: expected no failure, got OSError.*No space left"
        ) as caught:
            save_step(tmp_path, 2)
    assert "in commit" in "".join(caught.value.__notes__)
    assert latest(tmp_path) == tmp_path / "step_00000001"
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert read_value(save_step(tmp_path, 2)) == 2.0


def die_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """End the process at the ``call``-th rename of a path."""
    real, count = Path.rename, iter(range(1, 99))

    def rename(self: Path, target: Path) -> Path:
        if next(count) == call:
            os._exit(1)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def save_and_die(work: Callable[[], Any]) -> None:
    """Run ``work`` in a child that dies of it."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_death_before_the_rename_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that dies with everything written is never chosen, and the next save cleans up after it."""
    save_step(tmp_path, 1)
    with monkeypatch.context() as patch:
        die_at(patch, 1)
        save_and_die(lambda: save_step(tmp_path, 2))
    assert any(".partial-" in name for name in names(tmp_path))
    assert latest(tmp_path) == tmp_path / "step_00000001"
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == tmp_path / "step_00000001"
    save_step(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """The newer checkpoint of a step takes the older one's place."""
    save_step(tmp_path, 1, 10.0)
    assert read_value(save_step(tmp_path, 1, 11.0)) == 11.0
    assert names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize("call", [1, 2])
def test_death_while_replacing_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """At any moment of a replacement the old checkpoint is found and loads, and the next save puts it back."""
    save_step(tmp_path, 1, 10.0)
    with monkeypatch.context() as patch:
        die_at(patch, call)
        save_and_die(lambda: save_step(tmp_path, 1, 11.0))
    found = latest(tmp_path)
    assert found is not None
    assert read_value(found) == 10.0
    save_step(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert read_value(tmp_path / "step_00000001") == 10.0


def test_a_failed_replacement_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new one can't take its place the old one returns to it."""
    save_step(tmp_path, 1, 10.0)
    real, count = Path.rename, iter(range(1, 99))

    def rename(self: Path, target: Path) -> Path:
        if next(count) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_step(tmp_path, 1, 11.0)
    assert read_value(tmp_path / "step_00000001") == 10.0


def test_keep_deletes_the_lowest_steps(tmp_path: Path) -> None:
    """After each save only `keep` steps are left."""
    for step in range(1, 6):
        save_step(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step_00000004", "step_00000005"]
    verify(tmp_path / "step_00000004")


def test_keep_leaves_a_step_that_others_need(tmp_path: Path) -> None:
    """They stay until the file that lists the runs is removed; it lists each once."""
    for step in range(1, 4):
        save_step(tmp_path, step, keep=2)
        for who in ("/runs/a", "/runs/b", "/runs/a") if step == 1 else ():
            mark_needed(tmp_path / "step_00000001", who)
    assert names(tmp_path) == ["latest", *(f"step_0000000{step}" for step in (1, 2, 3))]
    assert (tmp_path / "step_00000001" / "needed_by").read_text() == "/runs/a\n/runs/b\n"
    verify(tmp_path / "step_00000001")
    (tmp_path / "step_00000001" / "needed_by").unlink()
    save_step(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]


def test_a_step_is_marked_in_its_own_folder_alone(tmp_path: Path) -> None:
    """Not through a link to elsewhere, nor by waiting at a pipe; names and lines that are no text stay as they are."""
    file = tmp_path / "needed_by"
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        mark_needed(tmp_path, "/runs/a")
    assert not (tmp_path / "elsewhere").exists()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="not seekable"):
        mark_needed(tmp_path, "/runs/a")
    file.unlink()
    file.write_bytes(b"\xff\n")
    for _ in range(2):
        mark_needed(tmp_path, "/runs/\udcfe")
    assert file.read_bytes() == b"\xff\n/runs/\xfe\n"


def test_a_run_that_went_back_keeps_the_steps_that_it_resumes_from(tmp_path: Path) -> None:
    """Steps above the one just saved are another line's: they neither count nor go."""
    for step in (5, 6, 7, 8, 9):
        save_step(tmp_path, step)
    save_step(tmp_path, 7, 7.5, keep=2)
    assert names(tmp_path) == ["latest", *(f"step_0000000{step}" for step in (6, 7, 8, 9))]
    assert read_value(tmp_path / "step_00000007") == 7.5
    save_step(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["latest", *(f"step_0000000{step}" for step in (5, 6, 7, 8, 9))]


@pytest.mark.parametrize("name", ["unlink", "rmdir"])
def test_what_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither what a dead save left, nor a checkpoint that is replaced, nor one that isn't kept; a later save does."""
    save_step(tmp_path, 1)
    (tmp_path / ".step_00000009.partial-00000000").mkdir()
    (tmp_path / ".step_00000009.partial-00000000" / "x").write_text("")

    def fail(*_: Any, **more: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")  # as NFS says of a file that is still open somewhere

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        save_step(tmp_path, 1, 1.5)
        save_step(tmp_path, 2, keep=1)
    assert len([path for path in names(tmp_path) if ".deleted-" in path]) == 3
    assert latest(tmp_path) == tmp_path / "step_00000002"
    save_step(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_a_failed_look_for_older_steps_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the commit is no failure of the save."""
    save_step(tmp_path, 1)

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(_folder, "_committed", fail)
        save_step(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


@pytest.mark.parametrize("before", [None, 1.0])
def test_a_failure_after_the_commit_is_not_reported_as_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float | None
) -> None:
    """If `latest` can't be replaced the step is there and whole, and the message says so."""
    save_step(tmp_path, 1)
    if before is not None:
        save_step(tmp_path, 2, before)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(
            WriteError, match=r"/latest: expected no failure after step_00000002 was committed, .* Input/output error"
        ):
            save_step(tmp_path, 2)
    assert read_value(tmp_path / "step_00000002") == 2
    assert ".latest.partial" not in names(tmp_path)


def test_latest_names_the_step_before_the_older_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting takes long, and whoever dies in it has finished its save."""
    save_step(tmp_path, 1, 1.0)
    save_step(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: os._exit(1))
        save_and_die(lambda: save_step(tmp_path, 1, 1.5))
    assert latest(tmp_path) == tmp_path / "step_00000001"
    assert read_value(tmp_path / "step_00000001") == 1.5


def test_new_folders_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that holds a new folder is synced, for each that was made."""
    synced: list[Path] = []

    def note(folder: Path) -> None:
        synced.append(folder)
        sync_folder(folder)

    monkeypatch.setattr(_folder, "sync_folder", note)
    save_step(tmp_path / "a" / "b", 1)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


def test_half_deleted_steps_are_never_chosen_and_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that dies half way leaves nothing that looks committed."""
    save_step(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: os._exit(1))
        save_and_die(lambda: save_step(tmp_path, 2, keep=1))
    assert any(".deleted-" in name for name in names(tmp_path))
    assert latest(tmp_path) == tmp_path / "step_00000002"
    save_step(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_a_moved_checkpoint_still_loads(tmp_path: Path) -> None:
    """A step folder holds all that it needs: it can be copied and renamed."""
    save(tmp_path, 1, {"a": Common(1)}, **ABOUT)
    shutil.move(tmp_path / "step_00000001", tmp_path / "best")
    assert load(tmp_path / "best", {"a": Common(0)}).tree == {"a": Common(1)}


def test_a_folder_without_manifest_is_named(tmp_path: Path) -> None:
    """Loading what is no checkpoint says so."""
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: expected the manifest of a checkpoint, got FileNotFound"
    ):
        load(tmp_path, {})
