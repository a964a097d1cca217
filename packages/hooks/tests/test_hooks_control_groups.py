"""How many cores a process may use: those on which it may run, or fewer by quotas of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.hooks import count_cores


def plant(root: Path, version: int, group: str, quotas: dict[str, int]) -> None:
    """Write the files of control groups: this process's, and their quotas in thousandths of a core; below 0: none."""
    line = f"4:cpu,cpuacct:{group}\n" if version == 1 else f"0::{group}\n"
    files = {"proc/self/cgroup": line}
    for folder, quota in quotas.items():
        if version == 1:
            files[f"sys/fs/cgroup/cpu/{folder}cpu.cfs_quota_us"] = f"{quota * 100 if quota > 0 else -1}\n"
            files[f"sys/fs/cgroup/cpu/{folder}cpu.cfs_period_us"] = "100000\n"
        else:
            files[f"sys/fs/cgroup/{folder}cpu.max"] = f"{quota * 100 if quota > 0 else 'max'} 100000\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("group", "quotas", "cores"),
    [
        ("/a/b", {"": -1, "a/": -1, "a/b/": 1500}, 2),
        ("/a/b", {"": -1, "a/": 3000, "a/b/": 5000}, 3),
        ("/a/b", {"": -1, "a/": 9000, "a/b/": 64000}, 8),
        ("/", {"": 500}, 1),
        ("/of/the/host", {"": 7000, "a/": 1000}, 7),
        ("/a", {"": -1, "a/": -1}, 8),
        ("/a", {}, 8),
    ],
)
def test_cores_are_bound_by_quotas(
    version: int, group: str, quotas: dict[str, int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of all groups around this process, rounded up; a container sees its own group as the root."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(8)))
    plant(tmp_path, version, group, quotas)
    assert count_cores(tmp_path) == cores


@pytest.mark.parametrize("text", ["", "max", "1000", "-1 100000", "a b"])
def test_files_that_say_nothing_bind_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any form."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {1, 5})
    plant(tmp_path, 2, "/", {"": -1})
    (tmp_path / "sys" / "fs" / "cgroup" / "cpu.max").write_text(text)
    assert count_cores(tmp_path) == 2
