"""What the README shows works as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from mimo.model import ProjectorConfig
from mimo_encoder_audio import WHISPER, WhisperConfig

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_readme_code_runs() -> None:
    """A clip becomes the rows that it promises."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - the README is ours


def test_readme_settings_are_settings() -> None:
    """The table of settings in the example makes a config, with a row for each 80 ms."""
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    values = tomllib.loads(text)["modules"]["audio"]["config"]
    config = WhisperConfig(**{**values, "projector": ProjectorConfig(**values["projector"])})
    assert WHISPER.rows(config, (16_000, 16_000)) == 13


def test_readme_names_every_setting() -> None:
    """None is missing in the table."""
    named = set(re.findall(r"`(\w+)`", "".join(line for line in TEXT.splitlines() if line.startswith("|"))))
    assert {field.name for field in WhisperConfig.__attrs_attrs__} <= named
