"""What `mimo check` shows of parameters and operations."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mimo.model import OpCost
from mimo.trainer.commands.tables.module_stats import show_module_stats
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.module_stats import ModuleStats, module_stats
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import op_costs
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve


def _job(folder: Path, **language: Any) -> Job:
    lines = folder / "train.jsonl"
    lines.write_text('{"text": "a few words"}\n' * 8)
    config = {"hidden": 16, "layers": 4, "heads": 2, "intermediate": 24, "vocabulary": 300}
    table = {
        "run": {"name": "told", "steps": 1, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-1", "pp": 2, "config": config, **language}},
    }
    return resolve(make_settings(table))


def test_parts_are_those_of_the_plugin_and_stages_are_summed(tmp_path: Path) -> None:
    """Parameters are counted once; operations are those of the formula, for all eight samples of a step."""
    job = _job(tmp_path)
    samples = SampleStats.of(job)
    found = {one.part: one for one in module_stats(job, samples)}
    assert list(found) == ["embedding", "layers", "head"]
    assert found["embedding"].parameters == found["embedding"].trained == 300 * 16
    for part, one in found.items():
        of_stages = [op_costs(job, stage, samples).get(part, OpCost()) for stage in job.graph.stages]
        whole = sum(of_stages, OpCost())
        assert one.forward == pytest.approx(whole.forward)
        assert one.backward == pytest.approx(whole.input_gradient + whole.weight_gradient)
        assert one.repeated == 0
    assert found["layers"].forward > found["head"].forward > 0


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    """Though two stages hold them."""
    config = {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 24, "vocabulary": 300}
    tied, untied = (
        sum(one.parameters for one in module_stats(job, SampleStats.of(job)))
        for job in (_job(tmp_path, config={**config, "tied": tied}) for tied in (True, False))
    )
    assert untied - tied == 300 * 16


def test_what_is_frozen_has_no_backward(tmp_path: Path) -> None:
    """Nothing before the first part that trains; no weight gradients of a frozen part behind it; layers repeated."""
    job = _job(tmp_path, frozen=["embedding", "head"], recompute="full")
    found = {one.part: one for one in module_stats(job, SampleStats.of(job))}
    assert [one.trained for one in found.values()] == [0, found["layers"].parameters, 0]
    assert found["embedding"].backward == 0
    assert found["head"].backward == found["head"].forward > 0
    assert found["layers"].repeated == found["layers"].forward > 0


def test_table_of_module_stats() -> None:
    """A line for each part, in units of 10^12 operations, and their sum."""
    console = Console(file=io.StringIO(), width=120)
    some = ModuleStats(module="eye", part="encoder", parameters=1500, trained=1000, forward=2.5e12, backward=5e12)
    more = ModuleStats(module="language", part="layers", parameters=500, trained=500, forward=1e12, repeated=1e11)
    console.print(show_module_stats([some, more]))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        ["module", "part", "parameters", "trained", "forward", "backward", "once", "more"],
        ["eye", "encoder", "1,500", "1,000", "2.5", "5", "0"],
        ["language", "layers", "500", "500", "1", "0", "0.1"],
        ["all", "2,000", "1,500", "3.5", "5", "0.1"],
    ]
