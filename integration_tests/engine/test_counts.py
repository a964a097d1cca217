"""What a step and an evaluation count is the same in every layout: nothing twice where ranks hold the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from cases import in_turn
from jobs import CPU, make_job
from tables import Table, alone, table

from mimo.hooks import EvaluationInfo, StepInfo
from mimo.testing import Pool
from mimo.trainer import Trainer

EXPERTS = {"experts": 4, "expert_intermediate": 16, "dense_layers": 1, "balance_loss": 0.1, "z_loss": 0.1}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "context and sequence slices": {
        "vision": {"ranks": [0, 1], "tp": 2, "sequence_parallel": True},
        "language": {"ranks": [0, 1, 2, 3], "cp": 2, "tp": 2, "sequence_parallel": True, "ep": 4},
    },
    "tensor ranks that hold the same, stages and idle ranks": {
        "vision": {"ranks": [0, 2], "cp": 2},
        "language": {"ranks": [1, 2, 4, 5], "pp": 2, "tp": 2, "ep": 2},
    },
    "lanes": {"vision": {"ranks": [0]}, "language": {"ranks": [0, 1, 2, 3], "dp": 2, "cp": 2, "ep": 2}},
}


def run(rank: int, settings: Table) -> tuple[StepInfo, EvaluationInfo | None, list[Any]]:
    """Take a step and evaluate; return both results, and the predictions for samples that this rank scored."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    step, evaluation = trainer.train(1), trainer.evaluate_with_predictions(1)
    assert evaluation is not None
    return step, evaluation.info, list(evaluation.predictions)


@pytest.mark.parametrize(("layout", "weights"), in_turn(LAYOUTS, ["mixed", "none"]))
def test_counts_do_not_follow_from_the_layout(layout: str, weights: str, pool: Pool) -> None:
    """Rows, label tokens, samples cut short, loads, further losses, and each judged sample once."""
    settings = table(LAYOUTS[layout], microbatches=2, weights=weights, language=EXPERTS)
    settings["data"]["max_tokens"] = 12
    ((step, evaluation, written),) = pool.run(1, run, alone(settings))
    assert step.truncated > 0
    assert evaluation is not None
    assert len(written) == evaluation.samples > 0
    found = pool.run(make_job(settings).world, run, settings)
    for other, judged, _ in found:
        for key in ("rows", "label_tokens", "truncated", "counts"):
            assert getattr(other, key) == getattr(step, key), key
        assert other.label_weight == pytest.approx(step.label_weight, rel=1e-12)
        assert other.losses == pytest.approx(step.losses, rel=1e-6)
        assert attrs.evolve(judged, loss=0.0) == attrs.evolve(evaluation, loss=0.0)
    ours = sorted((attrs.astuple(one) for *_, some in found for one in some))
    assert ours == sorted(attrs.astuple(one) for one in written)
