"""Memory of the host: how much of it can be had, and the refusal of more than that."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from mimo.hooks import ConfigError

_GIB = 2**30


@attrs.frozen(kw_only=True)
class Held:
    """Bytes that an optimizer holds beside parameters and gradients, by where they are."""

    host: int
    device: int


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that can still be had: what the system has, within this process's control group.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    free = [_available(root / "proc" / "meminfo")]
    groups = root / "sys" / "fs" / "cgroup"
    for folder, limit, used, inactive in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
            told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            free.append(int(most) - taken + int(told.get(inactive, 0)))  # what is only cached from files is given back
    return max(min(free), 0)


def _available(meminfo: Path) -> int:
    """Return what the system could give without swapping."""
    try:
        told = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(told["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_host_memory(needed: int, free: int) -> None:
    """Refuse to take more than there is.

    Args:
        needed: bytes that are about to be allocated.
        free: bytes that can be had.

    Raises:
        ConfigError: with both.
    """
    if needed > free:
        raise ConfigError(
            "optimizer.fraction",
            expected=f"a share of the optimizer's state that host memory can hold; it is {needed:,} bytes "
            f"({needed / _GIB:.2f} GiB) on this rank",
            got=f"{free:,} bytes ({free / _GIB:.2f} GiB) free",
            fix="Set it lower, spread the state over more data lanes, or run fewer ranks on this machine.",
        )
