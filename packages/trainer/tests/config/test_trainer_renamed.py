"""Settings with a new name: refused in new files, read in those that a run has saved."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.trainer.config.names import CONFIG_FILE, PLAN_FILE
from mimo.trainer.config.renamed import with_new_names
from mimo.trainer.config.toml import make_settings, read_settings

OLD = """
[run]
name = "r"
steps = 1
global_batch = 1
[data]
plugin = "jsonl"
[optimizer]
plugin = "hybrid"
patterns."*norm*" = { plugin = "hybrid" }
[modules.language]
plugin = "hybrid"
ranks = "0"
optimizer = { plugin = "hybrid", patterns."a.b" = { plugin = "hybrid" } }
"""
"""Wherever an optimizer is named, and a language model of the same name."""
TABLE = tomllib.loads(OLD)


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        (TABLE, "optimizer.plugin"),
        ({"optimizer": {"patterns": TABLE["optimizer"]["patterns"]}}, 'optimizer.patterns."*norm*".plugin'),
        ({"modules": TABLE["modules"]}, "modules.language.optimizer.plugin"),
        (
            {"modules": {"language": {"optimizer": {"patterns": {"a.b": {"plugin": "hybrid"}}}}}},
            'modules.language.optimizer.patterns."a.b".plugin',
        ),
    ],
    ids=["global", "pattern", "module", "module's pattern"],
)
def test_an_old_name_is_refused_with_the_new_one(table: Any, setting: str) -> None:
    """By the path of the setting; overrides too."""
    with pytest.raises(ConfigError) as caught:
        make_settings(table)
    assert str(caught.value) == (
        f"{setting}: expected 'cpu-offload', the new name of 'hybrid', got 'hybrid'. Write 'cpu-offload'."
    )
    with pytest.raises(ConfigError, match=r"^optimizer\.plugin: expected 'cpu-offload', the new name"):
        make_settings({}, ("optimizer.plugin=hybrid",))


def test_old_names_in_saved_files_become_new_ones() -> None:
    """The language model of the same name stays."""
    new = with_new_names(TABLE)
    assert new["optimizer"] == {"plugin": "cpu-offload", "patterns": {"*norm*": {"plugin": "cpu-offload"}}}
    assert new["modules"]["language"] == {
        "plugin": "hybrid",
        "ranks": "0",
        "optimizer": {"plugin": "cpu-offload", "patterns": {"a.b": {"plugin": "cpu-offload"}}},
    }
    odd = {"optimizer": 3, "modules": {"language": "hybrid"}}
    assert with_new_names(odd) == odd


def test_the_config_of_a_run_is_a_saved_file(tmp_path: Path) -> None:
    """As its plan lies beside it; the same file alone is a new one."""
    path = tmp_path / CONFIG_FILE
    path.write_text(OLD)
    with pytest.raises(ConfigError, match=r"^optimizer\.plugin: expected 'cpu-offload', the new name"):
        read_settings(path)
    (tmp_path / PLAN_FILE).write_text("{}")
    assert read_settings(path).optimizer.plugin == "cpu-offload"
    with pytest.raises(ConfigError, match=r"^optimizer\.plugin: expected 'cpu-offload', the new name"):
        read_settings(path, ("optimizer.plugin=hybrid",))
