"""What a run compiles of its modules, and which settings of it are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.model import DECODER
from mimo.model.runtime import Compilation
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.profile import layout_of
from mimo.trainer.job.compilation import compilations, compile_backend
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Resolve a language model of two stages with overrides."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    config = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 32}
    table = {
        "run": {"name": "r", "steps": 10, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "tokenizer": {"plugin": "byte"},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-1", "pp": 2, "config": config}},
    }
    return lambda *overrides: resolve(make_settings(table, overrides))


def test_a_run_compiles_what_it_is_asked_for(job: Callable[..., Job]) -> None:
    """Nothing by itself; else each module's layers, with inductor if nothing else is said."""
    assert (compilations(job()), compile_backend(job().settings.run)) == ({}, "")
    asked = job("run.compile=true")
    assert compile_backend(asked.settings.run) == "inductor"
    assert compilations(asked) == {"language": Compilation(layers={"Layer": 2}, eager={})}
    assert compile_backend(job("run.compile=true", "run.compile_backend=aot_eager").settings.run) == "aot_eager"


def test_a_profile_is_of_layers_as_they_are_compiled(job: Callable[..., Job]) -> None:
    """Those of runs that compile nothing stay what they were."""
    assert "compile" not in layout_of(job())["language"]
    assert layout_of(job("run.compile=true"))["language"]["compile"] == "inductor"


def test_a_run_that_has_nothing_to_compile_is_refused(job: Callable[..., Job]) -> None:
    """Rather than that a setting does nothing; what keeps each module eager is said."""
    asked, eager = job("run.compile=true"), attrs.evolve(DECODER, compiles=False)
    with pytest.raises(ConfigError) as refused:
        compilations(attrs.evolve(asked, modules=(attrs.evolve(asked.language, spec=eager),)))
    assert str(refused.value) == (
        "run.compile: expected a module with layers that can be compiled, got language stays eager, as the plugin "
        "'decoder' says that its layers can't be compiled. Set it to false."
    )


def test_a_backend_is_refused_where_nothing_is_compiled(job: Callable[..., Job]) -> None:
    """It would be ignored."""
    with pytest.raises(ConfigError) as refused:
        job("run.compile_backend=aot_eager")
    assert str(refused.value) == (
        "run.compile_backend: expected 'inductor' where compile is false, got 'aot_eager'. "
        "Set run.compile to true, or leave it out."
    )
