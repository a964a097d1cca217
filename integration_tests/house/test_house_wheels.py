"""Every package builds a wheel that holds its files, its entry points, and nothing of the others."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest
from house import Room, rooms


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_wheel_holds_exactly_the_sources(room: Room, tmp_path: Path) -> None:
    """What lies under ``src`` is in the wheel, without an ``__init__.py`` for the namespace."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=room.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        written = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        found = ConfigParser(delimiters=("=",))
        for name in written:
            found.read_string(archive.read(name).decode())
    assert set(names) == {path.relative_to(room.source).as_posix() for path in room.files()}
    assert "mimo/__init__.py" not in names
    assert {group: dict(found[group]) for group in found.sections()} == {
        **room.project.get("entry-points", {}),
        **({"console_scripts": room.project["scripts"]} if "scripts" in room.project else {}),
    }
