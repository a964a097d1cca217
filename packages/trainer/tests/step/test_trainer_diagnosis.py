"""What the heartbeat of a process says while it executes a plan and reads samples."""

from __future__ import annotations

from typing import cast

import pytest

from mimo.hooks import DataError
from mimo.launch import Heartbeat, Status
from mimo.schedule import Action
from mimo.trainer.batch.broken import BrokenSamples
from mimo.trainer.batch.lookahead import BatchLookahead
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.step.plan_runner import PlanProgress


def at(progress: Heartbeat, *, rank: int = 0) -> Status:
    """Return the status that others read of a heartbeat."""
    return Status.of(progress, rank=rank, seconds=5, query=1)


def test_a_heartbeat_names_module_stage_microbatches_and_the_peer_of_an_edge() -> None:
    """As the executor and the boundary noted them last; a wait that is over is forgotten."""
    progress = Heartbeat()
    progress.enter("step 3")
    plan = PlanProgress(progress, lambda _stage: (1,))
    plan.begin(Action(kind="input-gradient", module="vision", stage=1, microbatches=(2, 3)))
    plan.wait("vision->language", 5)
    assert at(progress).describe_wait(0) == (
        "in step 3, backward of vision stage 1, microbatches 2-3, for rank 5 (edge vision->language)"
    )
    plan.resume(lambda: True)
    assert not at(progress).waits
    plan.begin(None)
    assert (at(progress).activity, progress.changes) == ("step 3", 5)


def test_a_reduction_waits_for_the_other_ranks_of_its_stage() -> None:
    """All that share its parameters are among them; a rank that is alone waits for nobody."""
    progress, action = Heartbeat(), Action(kind="reduce", module="vision", stage=0)
    PlanProgress(progress, lambda _stage: (1, 2, 4)).begin(action)
    assert at(progress, rank=2).describe_wait(2) == "in sum of gradients of vision stage 0, for ranks 1,4"
    PlanProgress(progress, lambda _stage: (2,)).begin(action)
    assert not at(progress, rank=2).waits


def test_the_reading_of_samples_is_reported_where_it_happens() -> None:
    """Samples are read as their digest is computed; also where they can't be."""
    progress, seen = Heartbeat(doing="step 3"), list[str]()

    def digest(_data: StepData) -> None:
        seen.append(progress.doing)
        raise DataError("train.jsonl:1", expected="text", got="none")

    lookahead = BatchLookahead(
        cut=lambda _step: StepData(make=tuple),
        digest=digest,
        broken=cast("BrokenSamples", None),
        agree=lambda _stats: pytest.fail("nothing is compared"),
        reach=1,
        last=9,
        progress=progress,
    )
    lookahead.prepare_next(3)
    assert (seen, progress.doing) == (["step 3, reading the samples of step 4"], "step 3")
