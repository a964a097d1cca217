"""What `mimo check` shows of modules of several chunks, passes and recomputation, and what their ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from mimo.hooks import Kind
from mimo.schedule import SCHEDULES
from mimo.trainer.commands.main import run
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import read_settings
from mimo.trainer.cost.memory import estimate_memory
from mimo.trainer.resolving.resolve import resolve

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 4
directory = "{directory}"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-1"
pp = 2
chunks = 2
config = {{ hidden = 32, layers = 4, heads = 2, intermediate = 32, vocabulary = 300, tied = true }}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file of a model that reads text alone, with two stages on each of two ranks."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return path


def test_check_shows_the_stages_of_a_rank(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the place of a pipeline rank, and by stage in the plan; the modules' table says how many chunks there are."""
    assert run(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert "module    plugin   ranks  pp  dp  cp  tp  chunks  frozen" in out
    assert "0     stages 0,2 dp 0 cp 0 tp 0  about" in out
    assert "1     stages 1,3 dp 0 cp 0 tp 0  about" in out
    assert "language.2:F0" in out
    assert run(["check", str(file), "modules.language.chunks=1"]) == 0
    assert not {"chunks", "batch_factor", "recompute", "stages"} & set(capsys.readouterr().out.split())


def test_check_shows_what_else_is_passed_or_recomputed_otherwise(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns for what is not as usual."""
    assert run(["check", str(file), "modules.language.chunks=1", "modules.language.recompute=full"]) == 0
    out = capsys.readouterr().out
    assert "tp  recompute  frozen" in out
    assert "1   full       -" in out


def test_check_shows_what_is_sent_between_stages_of_a_rank(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each edge by its stages, round the loop."""
    assert run(["check", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {
        (line[0], line[1]): line[2] for line in lines if line and line[0].startswith("language.") and len(line) == 7
    }
    assert rows["language.0-1", "0"] == rows["language.1-2", "1"] == rows["language.2-3", "0"] == "24"


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find what is installed, but lay chunks in a V."""
    found = find_installed(kind, name, where)
    return attrs.evolve(found, placement=lambda _config: "v") if kind is SCHEDULES else found


def test_a_shared_parameter_is_held_once(file: Path) -> None:
    """In a loop each end of the model holds the tied embedding; in a V one rank holds it for both, once."""
    embedding, norm = 16 * 300 * 32 + 4, 16 * 32 + 4
    loop, turning = (
        {
            rank: memory.device - memory.activations
            for rank, memory in estimate_memory(resolve(read_settings(file), find=it)).items()
        }
        for it in (find_installed, find)
    )
    assert loop[1] - loop[0] == norm
    assert turning[0] - turning[1] == embedding + norm
    assert sum(loop.values()) - sum(turning.values()) == embedding
    assert loop[0] == turning[1] + embedding
