"""Keeps what a trial has found in the user's cache folder, so that other processes needn't try it again.

A record is a small JSON file, named by a digest of what was tried and of all versions. What is refused isn't kept: who
meets a refusal has tried it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import torch

from mimo.hooks import ConfigError, JsonNode, JsonSource, UserError

T = TypeVar("T")
VARIABLE = "MIMO_TRIALS"
"""Environment variable that names the folder of records; ``0``, or nothing, where none are to be kept."""
_MAX_BYTES = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SOURCES = ("mimo.model", "mimo_transformers")
"""Packages of ours that decide what a trial finds."""


@attrs.frozen(kw_only=True)
class Form(Generic[T]):
    """How a finding stands in a record.

    Args:
        write: returns it as plain data, None where it isn't to be kept.
        read: returns the finding of such data, or raises `UserError`.
    """

    write: Callable[[T], Any]
    read: Callable[[JsonNode], T]


def recall(trial: str, description: str, find: Callable[[], T], form: Form[T]) -> T:
    """Return what a trial has found, from its record if there is one that is whole; else try, and record it.

    Args:
        trial: its name.
        description: all that its finding depends on, but for versions.
        find: makes the trial.
        form: of the finding.

    Raises:
        ConfigError: the environment names no folder.
    """
    folder = records_folder()
    if folder is None:
        return find()
    about = {"trial": trial, "of": description, "versions": dict(_versions())}
    file = folder / f"{_digest(about)}.json"
    with suppress(OSError, UserError, RecursionError):  # which deep nesting would raise
        return _read(file, about, form)
    finding = find()
    if (found := form.write(finding)) is not None:
        with suppress(OSError):  # a full disk, a home that isn't there: the next one tries again
            _write(file, {**about, "found": found, "digest": _digest(found)})
    return finding


def records_folder() -> Path | None:
    """Return the folder of records; None where none are to be kept.

    Raises:
        ConfigError: the environment names no folder.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        home = os.environ.get("XDG_CACHE_HOME", "")
        folder = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()  # as its specification says
        return folder / "mimo" / "trials" if folder.is_absolute() else None
    if named in {"", "0"}:
        return None
    if not Path(named).is_absolute():
        expected, fix = "a folder's whole path, or 0 to keep no records", f"Set {VARIABLE}=/some/folder."
        raise ConfigError(VARIABLE, expected=expected, got=repr(named), fix=fix)
    return Path(named)


def _read(file: Path, about: Mapping[str, Any], form: Form[T]) -> T:
    """Return the finding of a record.

    Raises:
        OSError: there is no such file, or it may be another user's.
        UserError: it isn't whole, or is of something else.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
        if not (stat.S_ISREG(status.st_mode) and is_own and status.st_size <= _MAX_BYTES):
            msg = f"{file} is no small file that this user alone may write"
            raise OSError(msg)
        text = opened.read(_MAX_BYTES)
    root = JsonSource(where=str(file), error=UserError).parse(text)
    said = root.fields([*about, "found", "digest"])
    for key, value in about.items():
        if said[key].value != value:
            raise said[key].fail("that of this trial")
    if said["digest"].text() != _digest(said["found"].value):
        raise said["found"].fail("what its digest says")
    return form.read(said["found"])


def _write(file: Path, record: Mapping[str, Any]) -> None:
    """Put a record where it belongs, whole or not at all, however many processes do."""
    text = json.dumps(record).encode()
    if len(text) > _MAX_BYTES:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")  # which this user alone may write
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(text)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@cache
def _versions() -> Mapping[str, str]:
    """Return all but the description that a finding depends on; of our own packages their text."""
    ours = hashlib.sha256()
    for package in _SOURCES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for home in map(Path, spec.submodule_search_locations):
            for file in sorted(home.rglob("*.py")):
                ours.update(f"{package}/{file.relative_to(home)}".encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "mimo": ours.hexdigest(),
        "machine": platform.machine(),
    }
