"""What the README shows works as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from mimo_generator_flow import FLOW, FlowConfig

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_readme_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Two pictures have the losses that it says, and two are made."""
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)


def test_readme_settings_are_settings() -> None:
    """The table of settings in the example makes a config."""
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    config = FlowConfig(**tomllib.loads(text)["modules"]["drawer"]["config"])
    assert (config.targets, FLOW.reads(config), FLOW.rows(config)) == (256, "own", 32)


def test_readme_names_every_setting() -> None:
    """None is missing in the table."""
    named = set(re.findall(r"`(\w+)`", "".join(line for line in TEXT.splitlines() if line.startswith("|"))))
    assert {field.name for field in FlowConfig.__attrs_attrs__} <= named
