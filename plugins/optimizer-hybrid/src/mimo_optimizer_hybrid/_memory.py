"""Memory of the host: what of it this process may take and others take too, and the refusal of more than there is."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from mimo.hooks import ConfigError, ControlGroup, control_groups


@attrs.frozen(kw_only=True)
class HeldBytes:
    """Bytes that an optimizer holds beside parameters and gradients, by where they are."""

    host: int
    device: int


@attrs.frozen(kw_only=True)
class Pool:
    """Memory that processes of one machine share: all that it has, or what a control group of theirs may use.

    Args:
        key: the same in each process that shares it, 64 bits.
        free: bytes that can still be had of it.
    """

    key: int
    free: int


@attrs.frozen(kw_only=True)
class Asked:
    """What processes are about to take of a pool together.

    Args:
        ranks: theirs.
        needed: bytes.
        free: bytes that the last of them to look found.
    """

    ranks: tuple[int, ...]
    needed: int
    free: int


def pools(root: Path = Path("/")) -> list[Pool]:
    """Return all memory that this process is bound by: the system's, and that of its control groups that have a limit.

    A control group is bound by those around it too, of either version of Linux's control groups, as far as they can be
    seen from here.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    machine = machine_of(root)
    found = [Pool(key=key_of(machine), free=_available(root / "proc" / "meminfo"))]
    for group in control_groups("memory", root):
        files = _FILES[group.version]
        free = files.free(group)
        if free is not None:
            found.append(Pool(key=key_of(machine, files.limit, group.number), free=free))
    return found


def check_host_memory(asked: Sequence[Asked], *, world: int = 1) -> None:
    """Refuse to take more than there is.

    Args:
        asked: of each pool.
        world: number of processes of the run.

    Raises:
        ConfigError: with what is needed and what is free of the pool that lacks most.
    """
    short = max(asked, key=lambda one: one.needed - one.free, default=None)
    if short is not None and short.needed > short.free:
        ranks = ", ".join(map(str, short.ranks))
        by = "" if world == 1 else f" for rank {ranks}" if len(short.ranks) == 1 else f" for ranks {ranks} together"
        raise ConfigError(
            "optimizer.fraction",
            expected=f"a share of the optimizer's state that host memory can hold; it is {_shown(short.needed)}{by}",
            got=f"{_shown(short.free)} free",
            fix="Set fraction lower in the table that chooses this plugin (optimizer, a module's or a pattern's), "
            "spread the state over more data lanes, or run fewer ranks on this machine.",
        )


def ask_alone(needed: int) -> None:
    """Refuse to take more bytes than there are for this process, if it is alone.

    Raises:
        ConfigError: with what is needed and what is free.
    """
    check_host_memory([Asked(ranks=(0,), needed=needed, free=pool.free) for pool in pools()])


@attrs.frozen
class _Files:
    """Names of files of a version of Linux's control groups."""

    limit: str
    used: str
    inactive: str

    def free(self, group: ControlGroup) -> int | None:
        """Return what a group may still use; None if it has no limit, or is not one that can be seen."""
        most, used, stats = map(group.read, (self.limit, self.used, "memory.stat"))
        if not (most.isdigit() and used.isdigit()):
            return None
        stat = dict(line.split() for line in stats.splitlines())
        return max(int(most) - int(used) + int(stat.get(self.inactive, 0)), 0)  # cached files are given back


_FILES: Mapping[int, _Files] = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("memory.max", "memory.current", "inactive_file"),
}


def _available(meminfo: Path) -> int:
    """Return what the system could give without swapping."""
    meminfo_lines = dict(line.split(":", 1) for line in _read_text(meminfo).splitlines() if ":" in line)
    if "MemAvailable" in meminfo_lines:
        return int(meminfo_lines["MemAvailable"].removesuffix("kB")) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_of(root: Path = Path("/")) -> str:
    """Return what the processes of this machine call it, and no others."""
    return _read_text(root / "proc" / "sys" / "kernel" / "random" / "boot_id") or platform.node()


def _read_text(path: Path) -> str:
    """Return what stands in a file of the kernel; nothing if it has none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def key_of(*names: str) -> int:
    """Return a number of 64 bits that is the same in every process that has these names."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _shown(count: int) -> str:
    """Return a number of bytes, and the same in the largest unit of which there is one at least."""
    power = min(max(count, 1).bit_length() - 1, 49) // 10
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count:,} bytes" + (f" ({count / 2 ** (10 * power):.1f} {unit})" if power else "")
