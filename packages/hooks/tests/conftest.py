"""A folder of invented distributions, read by `importlib.metadata` as if they were installed; and a step's values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from textwrap import dedent

import attrs
import pytest

from mimo.hooks import StepInfo


@attrs.frozen
class Shelf:
    """Distributions in one folder, with their modules."""

    folder: Path

    def add(self, distribution: str, points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
        """Add a distribution of version 1.5: its entry points by group, and the source of its modules by name."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [
            line
            for group, named in points.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))

    def points(self) -> list[EntryPoint]:
        """Return the entry points of all distributions on the shelf."""
        return [point for found in distributions(path=[str(self.folder)]) for point in found.entry_points]


@pytest.fixture
def step() -> StepInfo:
    """What happened in some step."""
    return StepInfo(
        step=1,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        label_tokens=4,
        rows={},
        norms={},
        seconds=1.0,
        module_seconds={},
        tokens_per_second=4.0,
        truncated=0,
        skipped=False,
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """Hand out an empty shelf whose modules can be imported, and forget them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Shelf(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]
