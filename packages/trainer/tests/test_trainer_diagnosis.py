"""What ranks say of themselves, and who is named from it."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its own types don't say so

from mimo.hooks import DataError
from mimo.launch import Heartbeat, Status
from mimo.launch.faults.hang_report import show_silent, show_standstill, show_waits
from mimo.launch.process.heartbeat import _ranks_of
from mimo.launch.runtime import is_consequence
from mimo.schedule import Action
from mimo.trainer.batch.lookahead import Lookout
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.step.plan_progress import PlanProgress

RECEIVED = Status(
    doing="step 3",
    part="forward of language stage 0",
    waits=True,
    peers=(0,),
    through="edge vision->language",
    seconds=5.04,
)
GATHERS = Status(doing="step 3", part="forward of language stage 0", waits=True, peers=(2, 3), seconds=61)
SLEEPS = Status(doing="step 3", where="sleeper, line 7", seconds=5.5)


def at(progress: Heartbeat, *, rank: int = 0) -> Status:
    """Return what others are told of a progress."""
    return Status.of(progress, rank=rank, seconds=5, roll=1)


def test_a_mark_tells_module_stage_microbatches_and_the_peer_of_an_edge() -> None:
    """As the executor and the boundary noted them last; a wait that is over is forgotten."""
    progress = Heartbeat()
    progress.enter("step 3")
    plan = PlanProgress(progress, lambda _stage: (1,))
    plan.begin(Action(kind="input-gradient", module="vision", stage=1, microbatches=(2, 3)))
    plan.wait("vision->language", 5)
    assert at(progress).told(0) == (
        "in step 3, backward of vision stage 1, microbatches 2-3, for rank 5 (edge vision->language)"
    )
    plan.resume()
    assert not at(progress).waits
    plan.begin(None)
    assert (at(progress).place, progress.changes) == ("step 3", 5)


def test_a_reduction_waits_for_the_other_ranks_of_its_stage() -> None:
    """All that share its parameters are among them; a rank that is alone waits for nobody."""
    progress, action = Heartbeat(), Action(kind="reduce", module="vision", stage=0)
    PlanProgress(progress, lambda _stage: (1, 2, 4)).begin(action)
    assert at(progress, rank=2).told(2) == "in sum of gradients of vision stage 0, for ranks 1,4"
    PlanProgress(progress, lambda _stage: (2,)).begin(action)
    assert not at(progress, rank=2).waits


def test_what_is_done_within_something_is_told_until_it_is_done() -> None:
    """And then what it was done within."""
    progress = Heartbeat()
    progress.enter("step 3")
    with progress.within("step 3, reading the samples of step 4"):
        assert at(progress).place == "step 3, reading the samples of step 4"
    assert at(progress).place == "step 3"


def test_the_reading_of_samples_is_told_where_it_happens() -> None:
    """Samples are read as their digest is computed; also where they can't be."""
    progress, seen = Heartbeat(doing="step 3"), list[str]()

    def digest(_data: StepData) -> None:
        seen.append(progress.doing)
        raise DataError("train.jsonl:1", expected="text", got="none")

    lookout = Lookout(
        cut=lambda _step: StepData(microbatches=(), samples=0),
        digest=digest,
        agree=lambda _tally: pytest.fail("nothing is compared"),
        reach=1,
        last=9,
        progress=progress,
    )
    lookout.further(3)
    assert (seen, progress.doing) == (["step 3, reading the samples of step 4"], "step 3")


def test_a_group_that_is_being_destroyed_has_no_ranks() -> None:
    """As it may be while the thread that watches looks at the stack."""

    def collective(group: dist.ProcessGroup) -> tuple[int, ...]:
        frame = inspect.currentframe()
        assert frame is not None
        return _ranks_of(frame)

    assert collective(dist.ProcessGroup(HashStore(), 0, 1)) == ()


def test_a_mark_outside_of_collectives_tells_the_line(run_ranks: Callable[..., list[Any]]) -> None:
    """Ours, and not one of torch; in a collective its ranks."""

    def entry(rank: int) -> tuple[Status, Status | None]:
        torch.ones(2).sum()
        outside, seen = at(Heartbeat()), []
        pair = dist.new_group([0, 1])

        def look() -> None:
            until = time.monotonic() + 60
            while not (found := at(Heartbeat())).waits and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(found)
            dist.distributed_c10d._get_default_store().set("seen", "")

        if rank == 0:
            looker = threading.Thread(target=look)
            looker.start()
            dist.all_reduce(torch.ones(2), group=pair)
            looker.join()
            return outside, seen[0]
        dist.distributed_c10d._get_default_store().wait(["seen"])
        dist.all_reduce(torch.ones(2), group=pair)
        return outside, None

    ((outside, inside), _) = run_ranks(2, entry)
    assert inside is not None
    assert (outside.waits, outside.through) == (False, "")
    assert outside.where.startswith("mimo.launch.process.heartbeat, line ")
    assert (inside.waits, inside.peers, inside.through) == (True, (0, 1), "all_reduce")
    assert "test_trainer_diagnosis, line " in inside.where


def test_each_rank_that_waits_has_a_line_and_those_alike_share_one() -> None:
    """Those that don't wait, have left, or whose task tells nothing, have none."""
    marks = {
        0: SLEEPS,
        1: RECEIVED,
        2: GATHERS,
        3: GATHERS,
        7: RECEIVED,
        8: Status(waits=True),
        9: Status(doing="step 3", waits=True, left=True),
    }
    assert show_waits(marks).splitlines() == [
        "ranks 1,7 waited 5.0 s in step 3, forward of language stage 0, for rank 0 (edge vision->language)",
        "rank 2 waited 61 s in step 3, forward of language stage 0, for rank 3",
        "rank 3 waited 61 s in step 3, forward of language stage 0, for rank 2",
    ]


def test_a_thousand_ranks_are_told_in_few_lines() -> None:
    """The rest is counted by name."""
    marks = {rank: Status(doing=f"step {rank}", waits=True) for rank in range(1000)}
    lines = show_waits(marks).splitlines()
    assert len(lines) == 17
    assert lines[-1] == "ranks 16-999 waited too"


def test_silent_ranks_are_named_with_what_they_told_last() -> None:
    """Or that they never told anything."""
    assert show_silent({2}, {2: SLEEPS}) == (
        "rank 2 no longer answers: it was killed or stopped, or a machine or its network is gone. "
        "Rank 2 was last heard of in step 3."
    )
    assert show_silent({1, 2, 3}, {1: SLEEPS, 3: SLEEPS}) == (
        "ranks 1-3 no longer answer: they were killed or stopped, or a machine or its network is gone. "
        "Ranks 1,3 were last heard of in step 3; rank 2 was never heard of."
    )


def test_who_waits_for_nobody_holds_up_the_others() -> None:
    """Where all wait, the plan or a program is wrong, and nobody is blamed."""
    assert show_standstill({0: RECEIVED, 1: SLEEPS}, 5) == (
        "rank 1 did not go on for 5.5 s in step 3, at sleeper, line 7. run.timeout is 5 s."
    )
    assert show_standstill({0: RECEIVED, 1: GATHERS}, 600) == ("All ranks waited for each other. run.timeout is 600 s.")


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:34567"), True),
        (dist.DistNetworkError("lost"), True),
        (ConnectionResetError(), True),
        (RuntimeError("shapes differ"), False),
        (KeyError("gloo"), False),
    ],
)
def test_a_lost_connection_is_no_first_cause(error: BaseException, follows: bool) -> None:
    """Also as the cause of another error."""
    assert is_consequence(error) == follows
    outer = ValueError("could not save")
    outer.__cause__ = error
    assert is_consequence(outer) == follows
