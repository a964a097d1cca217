"""`mimo data index`: how many processes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.trainer.commands.data import index

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 8
[data]
plugin = "jsonl"
path = "train.jsonl"
max_tokens = 8
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 16, layers = 2, heads = 2, intermediate = 16 }
"""


def test_without_jobs_as_many_processes_read_as_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that this command may use, which a container's quota may bound."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "four"}\n')
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS)
    seen: list[int] = []

    def index_nothing(*_given: Any, jobs: int, **_settings: Any) -> tuple[()]:
        seen.append(jobs)
        return ()

    monkeypatch.setattr("mimo.hooks.count_cores", lambda: 3)
    monkeypatch.setattr("mimo.trainer.commands.indexing.index.index_sources", index_nothing)
    index(path)
    index(path, jobs=2)
    assert seen == [3, 2]
