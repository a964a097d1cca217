"""The settings that docs/optimizers.md shows are settings that work."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from house import ROOT
from jobs import find
from tables import table
from test_oracle import on

from mimo.trainer import read_settings, resolve
from mimo.trainer.runtime import check_patterns_of

PAGE = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
BLOCKS = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
WITH_PATTERNS = [block for block in BLOCKS if "patterns" in block.get("optimizer", {})]


@pytest.mark.parametrize("block", WITH_PATTERNS)
def test_the_page_of_optimizers_shows_patterns_that_something_follows(block: dict[str, Any]) -> None:
    """In a model with an encoder and a language model."""
    settings = table({"vision": on(0, 0), "language": on(0, 0)})
    settings["run"]["steps"] = 1000
    settings["optimizer"] = block["optimizer"]
    for name, keys in block.get("modules", {}).items():
        settings["modules"][name] |= keys
    check_patterns_of(resolve(read_settings(settings), find=find))


def test_the_page_of_optimizers_shows_patterns() -> None:
    """Those of one block for settings, and one for clipping."""
    assert len(WITH_PATTERNS) >= 2
