"""Linux's control groups, by which processes are bound: where those of this process lie, of either version."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import attrs


@attrs.frozen
class ControlGroup:
    """A group of processes that are bound together.

    Args:
        folder: of its files.
        version: of Linux's control groups.
    """

    folder: Path
    version: Literal[1, 2]

    @property
    def number(self) -> str:
        """The kernel's number of it: two containers may each call their own group the root."""
        return str(self.folder.stat().st_ino)

    @property
    def cores(self) -> int:
        """Of how many cores, rounded up, it may use the time; 0 if it has no limit."""
        if self.version == 1:
            quota, period = (self.read(f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            quota, _, period = self.read("cpu.max").partition(" ")
        return math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else 0

    def read(self, name: str) -> str:
        """Return what stands in one of its files; nothing if it has none."""
        return _read_text(self.folder / name)


def control_groups(controller: Literal["cpu", "memory"], root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield this process's group and all around it, from the one that is the root here.

    Args:
        controller: of what they bound.
        root: where ``proc`` and ``sys`` lie.
    """
    lines = [line.split(":", 2) for line in _read_text(root / "proc" / "self" / "cgroup").splitlines()]
    mount = root / "sys" / "fs" / "cgroup"
    older = [path for _, names, path in lines if controller in names.split(",")]
    yield from (ControlGroup(folder, 1) for folder in _around(mount / controller, older))
    yield from (ControlGroup(folder, 2) for folder in _around(mount, [path for _, names, path in lines if not names]))


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: those on which it may run, or fewer by a quota, as of a container.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    quotas = [group.cores for group in control_groups("cpu", root)]
    return min([len(os.sched_getaffinity(0)), *filter(None, quotas)])


def _around(mount: Path, paths: Sequence[str]) -> Iterator[Path]:
    own = next(iter(paths), "/")
    parts = [part for part in PurePosixPath(own).parts if part not in ("/", "..")]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        if folder.is_dir():  # a container sees its own group as the root, whatever its path is
            yield folder


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
