"""What a GPU machine without a network needs beside this repository: ``python gpu/carry.py``, on any machine with one.

Into ``gpu/carried``, which git ignores, go our packages as wheels, those wheels of others that such a machine may lack
(CPython 3.12, x86-64 Linux), and the digits of scikit-learn as a small file. All of it stays below 20 MiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from _carried import ABOUT, DIGITS, FOLDER, OURS, canonical

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MAX_BYTES = 20 * 2**20
THERE = frozenset({"pluggy", "pytest", "rich", "safetensors", "torch", "transformers"})
"""What the machine has, new enough; with `COMES_ALONG`. (It has attrs too, of whatever age.)"""
COMES_ALONG = frozenset({"fsspec", "jinja2", "markupsafe", "numpy", "pygments", "tokenizers"})
"""What torch, transformers and rich declare."""
LEFT_OUT = frozenset({"matplotlib", "pyarrow", "scikit-learn", "tensorboard"})
"""What a day on a GPU does without: pictures, tables; and the digits come as a file."""
NOT_CARRIED = frozenset({"dataset-parquet"})
"""Of our plugins those that can't be imported without that; one that is there and can't be imported ends every run."""
ALSO = ("cffi", "docstring-parser", "pycparser", "rich-rst", "typing-extensions")
"""What those that we declare need in turn."""
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

Run = Callable[[Sequence[str]], object]


def members() -> list[Path]:
    """Return the folders of our packages and plugins, without those that are `NOT_CARRIED`."""
    found = sorted(path.parent for kind in ("packages", "plugins") for path in ROOT.glob(f"{kind}/*/pyproject.toml"))
    return [folder for folder in found if folder.name not in NOT_CARRIED]


def missing(folders: Iterable[Path]) -> list[str]:
    """Return the distributions of others that packages declare, and what these need, and that may be missing there."""
    found = set(ALSO)
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        names = {canonical(re.match(r"[\w.-]+", line)[0]) for line in project.get("dependencies", ())}  # type: ignore[index]  # each begins with a name
        found |= {name for name in names if not name.startswith(OURS)}
    return sorted(found - THERE - COMES_ALONG - LEFT_OUT)


def download(names: Sequence[str], folder: Path, run: Run) -> None:
    """Fetch the newest wheel of each distribution that runs there, without what it needs."""
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    which = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    abis = [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    run([*pip(), "download", "--quiet", "--no-deps", *which, *abis, "-d", str(folder), *names])


def pip() -> list[str]:
    """Return the command: of this Python, or where it has none, as in environments of uv, the first on the path."""
    return [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of one of our packages, with the builder that its pyproject.toml names."""
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def write_digits(path: Path) -> None:
    """Write the 1,797 digits of scikit-learn: ``images`` [1797, 8, 8] of 0 to 16, ``digits`` [1797]."""
    import numpy as np
    from safetensors.numpy import save_file
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types

    read = load_digits()
    save_file({"images": read.images.astype(np.uint8), "digits": read.target.astype(np.uint8)}, path)


def carry(folder: Path, *, run: Run) -> list[Path]:
    """Gather everything anew; return the files.

    Args:
        folder: emptied first.
        run: what executes a command and raises where it fails.

    Raises:
        ValueError: it came to more than `MAX_BYTES`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ours = members()
    download(missing(ours), folder, run)
    for source in ours:
        build(source, folder)
    write_digits(folder / DIGITS)
    (folder / ABOUT).write_text(json.dumps({"source": source_of()}), encoding="utf-8")
    files = sorted(folder.iterdir())
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        largest = max(files, key=lambda file: file.stat().st_size)
        msg = f"expected at most {MAX_BYTES} bytes, got {size}, of {largest.name} {largest.stat().st_size}"
        raise ValueError(msg)
    return files


def source_of() -> str:
    """Return the commit that our wheels were made of, and whether files differed from it."""
    said = subprocess.run(  # noqa: S603  # words of our own
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],  # noqa: S607  # whichever git there is
        capture_output=True,
        check=False,
        text=True,
    )
    return said.stdout.strip() or "no git repository"


def _run(words: Sequence[str]) -> object:
    return subprocess.run(words, check=True)  # noqa: S603  # words of our own


def main() -> int:
    """Gather everything and say what it came to."""
    parser = argparse.ArgumentParser(description="Gather what a GPU machine without a network needs.")
    parser.add_argument("--into", type=Path, default=HERE / FOLDER, metavar="FOLDER")
    folder = parser.parse_args().into
    files = carry(folder, run=_run)
    for file in files:
        print(f"{file.stat().st_size / 2**20:8.2f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 2**20:8.2f} MiB  in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
