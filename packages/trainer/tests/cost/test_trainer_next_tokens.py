"""What `mimo check` shows of a language model with multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.model import OpCost
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.module_stats import module_stats
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import op_costs
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve


def _job(folder: Path, *, loss_rows: int = 0, **config: Any) -> Job:
    lines = folder / "train.jsonl"
    lines.write_text('{"text": "a few words"}\n' * 8)
    sizes = {"hidden": 16, "layers": 4, "heads": 2, "intermediate": 24, "vocabulary": 300}
    table = {
        "run": {"name": "told", "steps": 1, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "modules": {
            "language": {
                "plugin": "decoder",
                "ranks": "0-1",
                "pp": 2,
                "loss_rows": loss_rows,
                "config": {**sizes, **config},
            }
        },
    }
    return resolve(make_settings(table))


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_a_part_with_parameters_and_operations(tmp_path: Path, tied: bool) -> None:
    """The embedding that the last stage holds too is counted once; a token costs a layer, its product and the head."""
    job, bare = (_job(tmp_path, next_tokens=number, tied=tied) for number in (2, 0))
    samples = SampleStats.of(job)
    found = {one.part: one for one in module_stats(job, samples)}
    plain = {one.part: one for one in module_stats(bare, samples)}
    assert {part: one for part, one in found.items() if part != "next_tokens"} == plain
    assert bare.graph.by_name["language"].tied is tied
    assert job.graph.by_name["language"].tied is True
    layer = plain["layers"].parameters // 4
    assert found["next_tokens"].parameters == found["next_tokens"].trained == 2 * (layer + 2 * 16 * 16 + 3 * 16)
    whole = sum((op_costs(job, stage, samples).get("next_tokens", OpCost()) for stage in job.graph.stages), OpCost())
    assert found["next_tokens"].forward == pytest.approx(whole.forward)
    assert found["next_tokens"].forward > plain["layers"].forward / 2


def _costs(job: Job, part: str) -> OpCost:
    return sum((op_costs(job, stage, SampleStats.of(job)).get(part, OpCost()) for stage in job.graph.stages), OpCost())


@pytest.mark.parametrize(("part", "labels", "copies"), [("head", 11, 1), ("next_tokens", 19 / 2, 2)])
def test_logits_of_few_rows_are_made_twice_and_not_kept(tmp_path: Path, part: str, labels: float, copies: int) -> None:
    """Where the two samples of a microbatch have more labels than rows are held, by each depth of predictions."""
    most = round(2 * labels)
    kept, made = (_costs(_job(tmp_path, next_tokens=2, loss_rows=rows), part) for rows in (most, most - 1))
    logits = 8 * labels * copies * 300  # of the eight samples
    assert (kept.split - made.split, made.repeated - kept.repeated) == (logits, 2 * 16 * logits)
    assert (kept.recomputed, made.recomputed) == (0, 4 * (most - 1) * 300)  # of each of the four microbatches


def test_labels_of_later_tokens_are_packed_where_a_model_needs_them(tmp_path: Path) -> None:
    """One row for each token further on; none without."""
    for next_tokens in (0, 2):
        job = _job(tmp_path, next_tokens=next_tokens)
        assert job.train is not None
        packed = Microbatch(job, job.train, [0, 1]).packed(job.language, 0)
        assert packed.next_labels.shape == (next_tokens, len(packed.tokens))
        rest = [length - 1 for length in packed.lengths]
        assert packed.next_counts == tuple(tuple(each - k for each in rest) for k in range(1, next_tokens + 1))
