"""Linux's control groups, by which processes are bound: where those of this process lie, of either version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

Controller: TypeAlias = Literal["cpu", "memory"]
Version: TypeAlias = Literal[1, 2]


def control_groups(controller: Controller, root: Path = Path("/")) -> Iterator[tuple[Path, Version]]:
    """Yield the folders of this process's group and all around it, from the one that is the root here.

    Args:
        controller: of what they bound.
        root: where ``proc`` and ``sys`` lie.
    """
    lines = [line.split(":", 2) for line in read_text(root / "proc" / "self" / "cgroup").splitlines()]
    mount = root / "sys" / "fs" / "cgroup"
    older = [path for _, names, path in lines if controller in names.split(",")]
    yield from ((folder, 1) for folder in _around(mount / controller, older))
    yield from ((folder, 2) for folder in _around(mount, [path for _, names, path in lines if not names]))


def _around(mount: Path, paths: Sequence[str]) -> Iterator[Path]:
    own = next(iter(paths), "/")
    parts = [part for part in PurePosixPath(own).parts if part not in ("/", "..")]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        if folder.is_dir():  # a container sees its own group as the root, whatever its path is
            yield folder


def number_of(group: Path) -> str:
    """Return the kernel's number of a group: two containers may each call their own the root."""
    return str(group.stat().st_ino)


def read_text(path: Path) -> str:
    """Return what stands in a file of the kernel; nothing if it has none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
