"""What `carry.py` brings along, put where Python finds it: unpacked wheels, and the digits as a dataset.

Wheels are only archives, so nothing has to be installed: a machine that offers no pip will do.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

FOLDER = "carried"
"""Beside `day.py`; git ignores it."""
DIGITS = "digits.safetensors"
ABOUT = "carried.json"
OURS = "mimo-"
"""What the names of our distributions begin with."""

_PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: mimo-gpu-day\nVersion: 0.1.0\n",
    "entry_points.txt": "[mimo.datasets]\ncarried-digits = _carried_digits\n",
}


def unpack(carried: Path, site: Path) -> list[str]:
    """Unpack wheels into a folder to import from, and return their names.

    Those of other people are left out where this Python has the distribution already, as new or newer.

    Args:
        carried: where wheels lie; it may be missing.
        site: an empty folder.

    Raises:
        ValueError: an archive would write outside of the folder.
    """
    plugin = site / "mimo_gpu_day-0.1.0.dist-info"
    plugin.mkdir(parents=True)
    for name, text in _PLUGIN.items():
        (plugin / name).write_text(text, encoding="utf-8")
    return [wheel.name for wheel in sorted(carried.glob("*.whl")) if _unpack_one(wheel, site)]


def _unpack_one(wheel: Path, site: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    if not canonical(name).startswith(OURS) and _is_installed(canonical(name), version):
        return False
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            path = PurePosixPath(member)
            if path.is_absolute() or ".." in path.parts:
                msg = f"{wheel.name}: expected paths inside of it, got {member!r}"
                raise ValueError(msg)
        archive.extractall(site)
    return True


def _is_installed(name: str, least: str) -> bool:
    try:
        return _release(metadata.version(name)) >= _release(least)
    except metadata.PackageNotFoundError:
        return False


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what a build adds to it, or zeros at its end."""
    found = [int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number]  # type: ignore[index]  # it matches nothing at least
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def canonical(name: str) -> str:
    """Return a distribution's name in the form in which two can be compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(names: Iterator[str] | tuple[str, ...]) -> list[str]:
    """Return name and version of each distribution, as far as it is there."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    return found
