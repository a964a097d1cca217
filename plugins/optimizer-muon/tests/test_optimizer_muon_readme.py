"""The README's example works as it stands, and its settings are those that exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mimo_optimizer_muon import MuonConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _run_example(_rank: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})  # noqa: S102 - the README is ours


def test_muon_readme_example(run_ranks: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]) -> None:
    """It steps a matrix by Muon and a bias by AdamW."""
    run_ranks(1, _run_example)
    assert "['momentum_buffer'] ['exp_avg', 'exp_avg_sq', 'step']" in capfd.readouterr().out


def test_muon_readme_settings_are_the_defaults() -> None:
    """Every key of the plugin that the README shows has the value that it has by itself."""
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    table = tomllib.loads(text)["optimizer"]
    del table["plugin"], table["lr"]
    shown = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    config = MuonConfig()
    assert shown == {key: getattr(config, key) for key in shown}
