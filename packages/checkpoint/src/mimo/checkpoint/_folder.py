"""The folder of all steps: names, the newest step, commit by one rename, and what a dead save left behind.

`step_00000100` is committed. Names that begin with a dot aren't: `.step_00000100.partial-…` is being written,
`.step_00000100.deleted-…` is being deleted, and `.step_00000100.replaced-…` is a whole checkpoint that makes place for
another one of the same step; should that one never arrive, it is still this step's.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

import attrs

from mimo.checkpoint._manifest_file import MANIFEST_NAME
from mimo.checkpoint._ranks import MAKE_ROOM, WriteError
from mimo.checkpoint._writer import sync_folder
from mimo.hooks import CheckpointError

LATEST_NAME = "latest"

NEEDED_NAME = "needed_by"
"""In a step's folder, who else reads from it, a line each."""

STEPS = range(10**18)
"""Steps whose folders are found again."""

_SPARE_BYTES = 1 << 20  # for headers, the manifest, and what others write meanwhile

_STEP = re.compile(r"step_([0-9]{8,18})")
_ASIDE = re.compile(r"\.(step_[0-9]{8,18})\.(partial|deleted|replaced)-[0-9a-f]{8}")


def name_step(step: int) -> str:
    """Return the folder name of a step: ``step_00000100``."""
    return f"step_{step:08d}"


def latest(folder: Path) -> Path | None:
    """Return the newest committed step of ``folder``, or None.

    That is the one that the file `latest` names, even where a higher step exists: a run that went back to an earlier
    step has left that one behind. If the file is missing or names nothing committed, it is the highest step.

    Args:
        folder: holds the ``step_…`` folders; it need not exist.
    """
    committed = _committed(Path(folder))
    try:
        # A pipe would wait for ever, and whatever lies there may be large.
        with os.fdopen(os.open(Path(folder) / LATEST_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            named = file.read(64).decode("ascii", "replace").strip()
    except OSError:
        named = ""
    match = _STEP.fullmatch(named)
    if match and name_step(int(match[1])) == named and int(match[1]) in committed:
        return committed[int(match[1])]
    return committed[max(committed)] if committed else None


def begin(folder: Path, step: int, *, room: int) -> Path:
    """Clean up after dead saves and return a new partial folder for ``step``.

    Raises:
        WriteError: fewer than ``room`` bytes are free. A disk that is filled up would fail others who write to it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)
    for path in _find_asides(folder):
        match = _ASIDE.fullmatch(path.name)
        assert match is not None
        if match[2] == "replaced" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        else:
            _discard(path, int(match[1].removeprefix("step_")))
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < room + _SPARE_BYTES:  # some network file systems report no sizes
        raise WriteError(
            str(folder / name_step(step)),
            expected=f"{room + _SPARE_BYTES:,} bytes free on its disk",
            got=f"{disk.free:,}",
            fix=MAKE_ROOM,
        )
    partial = _aside(folder, step, "partial")
    partial.mkdir()
    return partial


def commit(partial: Path, step: int) -> Path:
    """Turn a partial folder, its files synced, into the committed and latest ``step``; return its path.

    The rename is the commit. An older checkpoint of the same step is moved aside before and deleted after it.

    Raises:
        WriteError: the step is committed, but not named by `latest`.
    """
    folder, final = partial.parent, partial.parent / name_step(step)
    old = _aside(folder, step, "replaced") if final.exists() else None
    pointer = partial.with_name(f".{LATEST_NAME}.partial")
    try:
        # Written before the commit, so that a full disk is noticed while nothing has changed.
        with pointer.open("wb") as file:
            file.write(f"{final.name}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        _take_place(partial, final, old)
        try:
            sync_folder(folder)
            pointer.replace(folder / LATEST_NAME)
            sync_folder(folder)
        except OSError as error:
            raise WriteError(
                str(folder / LATEST_NAME),
                expected=f"no failure after {final.name} was committed, which is whole",
                got=f"{type(error).__name__}: {error}",
                fix="Look at the disk.",
            ) from error
    except BaseException:
        with contextlib.suppress(OSError):
            pointer.unlink()
        raise
    if old is not None:
        _discard(old, step)
    return final


@attrs.frozen(kw_only=True)
class Keep:
    """Which steps stay: the ``newest`` so many, all if None, and the multiples of ``every``.

    Raises:
        CheckpointError: a number is below 1, or ``every`` is given where all stay anyway.
    """

    newest: int | None = None
    every: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in (("keep", self.newest), ("keep_every", self.every)):
            if value is not None and value < 1:
                raise CheckpointError(
                    f"checkpoint.{name}", expected="at least 1", got=repr(value), fix="Leave it out to keep all."
                )
        if self.every is not None and self.newest is None:
            raise CheckpointError("checkpoint.keep_every", expected="a number for keep beside it", got="none")


def prune(folder: Path, step: int, keep: Keep) -> None:
    """Delete the lowest committed steps that don't stay, of those below the one just saved, ``step``.

    A step above it is of a run that went back to an earlier one: it is left, and doesn't count. One that `mark_needed`
    has marked is left too.
    """
    if keep.newest is None:
        return
    others = sorted(other for other in _committed(folder) if other < step)
    for other in others[: max(0, len(others) + 1 - keep.newest)]:
        if keep.every is not None and other % keep.every == 0:
            continue
        if (folder / name_step(other) / NEEDED_NAME).exists():
            continue
        _discard(folder / name_step(other), other)


def mark_needed(folder: Path, who: str) -> None:
    """Have no ``keep`` delete a committed step any more; beside its files then stands who reads from it.

    Args:
        folder: of the step.
        who: one line; the same one is written once.

    Raises:
        OSError: it can't be written there.
    """
    line = os.fsencode(f"{who}\n")
    # Not through a link, which may lead anywhere, and without waiting for a pipe's other end.
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(folder / NEEDED_NAME, how, 0o666), "r+b") as lines:
        if line not in lines:
            lines.write(line)


def _take_place(partial: Path, final: Path, old: Path | None) -> None:
    """Rename ``partial`` to ``final``, what is there to ``old`` before; if that fails, all is as it was."""
    if old is not None:
        final.rename(old)
    try:
        partial.rename(final)
    except BaseException:
        if old is not None:
            old.rename(final)
        raise


def _discard(path: Path, step: int) -> None:
    """Delete a folder of ``step`` as far as that goes, which fails nothing: the next save deletes the rest."""
    # Under a name of its own first, so that nobody takes a half deleted checkpoint for a whole one.
    doomed = _aside(path.parent, step, "deleted")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _aside(folder: Path, step: int, role: str) -> Path:
    return folder / f".{name_step(step)}.{role}-{secrets.token_hex(4)}"


def _find_asides(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _ASIDE.fullmatch(path.name)]


def _committed(folder: Path) -> dict[int, Path]:
    """Return the committed steps, those included that a dead save had moved aside and not replaced."""
    found: dict[int, Path] = {}
    if not folder.is_dir():
        return found
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and name_step(int(match[1])) == path.name and (path / MANIFEST_NAME).is_file():
            found[int(match[1])] = path
    for path in _find_asides(folder):
        name, role = path.name[1:].split(".")
        if role.startswith("replaced-") and (path / MANIFEST_NAME).is_file():
            found.setdefault(int(name.removeprefix("step_")), path)
    return found
