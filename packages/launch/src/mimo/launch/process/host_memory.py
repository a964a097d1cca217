"""Whether a process that ended without an error message ran out of host memory, as far as its launcher can know.

The kernel does not say which process it killed for memory, but counts how often, per control group and machine.
Where a limit of the shell refuses memory, C++ ends the process by itself; all that is known then is how large the
process was.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

import attrs

_NEAR = 0.75
"""Share of a limit from which a process that aborts is taken to have met it: it is looked at about once a second."""
_GIB = 1 << 30
_IN_GROUP = (
    "It is out of host memory: the kernel killed for want of memory in this control group, "
    "by its limit or the machine's."
)
_ON_MACHINE = "The kernel has killed on this machine for want of memory since the run began; this may be one of those."
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@attrs.frozen(kw_only=True)
class Kills:
    """How often the kernel has killed for memory.

    Args:
        group: within the control group of this process, by its limit or the machine's; None where that can't be read.
        machine: on this machine.
    """

    group: int | None = None
    machine: int = 0

    @classmethod
    def now(cls, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Kills:
        """Return the counts so far."""
        files = [path / "memory.events" for path in _groups(proc, cgroups, "", "")]
        files += [path / "memory.oom_control" for path in _groups(proc, cgroups, "memory", "memory")]  # the older kind
        counts = [count for file in files if (count := _count(file, "oom_kill")) is not None]
        return cls(group=sum(counts) if counts else None, machine=_count(proc / "vmstat", "oom_kill") or 0)


def address_space() -> int | None:
    """Return how many bytes of address space this process, and what it starts, may have; None for any number."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@attrs.define
class HostMemory:
    """The host memory of some processes, looked at now and then while they live.

    Args:
        before: kills when they began.
        limit: bytes of address space that each may have; None for any number.
        sizes: bytes of address space that each had when it was last looked at, by process id.
    """

    before: Kills = attrs.field(factory=Kills.now)
    limit: int | None = attrs.field(factory=address_space)
    sizes: dict[int, int] = attrs.field(factory=dict)

    def look(self, pids: Iterable[int]) -> None:
        """Take note of how large processes are."""
        if self.limit is None:
            return
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                pages = int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[0])
                self.sizes[pid] = pages * resource.getpagesize() or self.sizes.get(pid, 0)

    def explain(self, pid: int, exit_code: int, now: Kills | None = None) -> str:
        """Return why a process ended without an error message, if it was for memory; else an empty text.

        Args:
            pid: which.
            exit_code: with which it ended; negative for signals.
            now: kills since.
        """
        now = Kills.now() if now is None else now
        if exit_code == -signal.SIGKILL:
            if now.group is not None and self.before.group is not None:
                return _IN_GROUP if now.group > self.before.group else ""
            return _ON_MACHINE if now.machine > self.before.machine else ""
        size = self.sizes.get(pid, 0)
        if self.limit is None or size < _NEAR * self.limit:
            return ""
        return (
            f"It is out of host memory: it had {size / _GIB:.1f} of the {self.limit / _GIB:.1f} GiB of address space "
            "that ulimit -v allows."
        )


def _groups(proc: Path, cgroups: Path, controller: str, folder: str) -> list[Path]:
    """Return the folder of this process's control group, as seen from outside of a container or from inside."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == controller:
                found = cgroups / folder / path.lstrip("/")
                return [found if found.is_dir() else cgroups / folder]
    return []


def _count(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name} (\d{{1,18}})$", path.read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) if found else None
    return None
