"""The example of the README works as it stands."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest

from mimo.hooks import RunInfo, StepInfo, lifecycle


class Shelf(Protocol):
    """The fixture of this folder."""

    def add(self, distribution: str, points: dict[str, dict[str, str]], **modules: str) -> None: ...
    def points(self) -> list[Any]: ...


def test_hooks_readme_plugin_is_called(shelf: Shelf, step: StepInfo, capsys: pytest.CaptureFixture[str]) -> None:
    """The two files of the README are a plugin that hears of steps."""
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    project = tomllib.loads(re.findall(r"```toml\n(.*?)```", readme, flags=re.DOTALL)[0])["project"]
    source = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0]
    shelf.add(project["name"], project["entry-points"], loss_alarm=source)
    run = RunInfo(name="r", directory=Path("runs/r"), rank=0, world=1, first_step=1, steps=2, config={})
    for number, loss in ((1, 12.0), (2, 3.0)):
        info = attrs.evolve(step, step=number, loss=loss)
        lifecycle(entry_points=shelf.points()).step_end(run, info)
    assert capsys.readouterr().out == "step 1: loss 12.0\n"
    assert "loss_alarm" in sys.modules
