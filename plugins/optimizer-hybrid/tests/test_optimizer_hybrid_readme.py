"""What the README shows runs as it is written there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import torch

from mimo_optimizer_hybrid import CpuOffloadConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the one block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


def test_the_loop_trains() -> None:
    """Its loss falls, and memory is as promised."""
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    exec(block("python"), names)  # noqa: S102  # our own page
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["optimizer"].held == names["optimizer"].promised
    assert f"`optimizer.fraction` = {names['optimizer'].fraction:.2f}" in README


def test_the_settings_are_those_that_there_are() -> None:
    """The example's, and each line of the table."""
    table = tomllib.loads(block("toml"))["optimizer"]
    known = {field.name for field in CpuOffloadConfig.__attrs_attrs__}
    assert table.keys() - known == {"plugin", "patterns"}
    listed = {
        key for line in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE) for key in re.findall(r"`(\w+)`", line)
    }
    assert listed == known
