"""The status of ranks, and which of them a hang report names."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its own types don't say so

from mimo.launch import Heartbeat, Status
from mimo.launch.faults.hang_report import show_silent, show_standstill, show_waits
from mimo.launch.process import heartbeat
from mimo.launch.process.heartbeat import _ranks_of
from mimo.launch.runtime import is_consequence

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
    """Return the status that others read of a heartbeat."""
    return Status.of(progress, rank=rank, seconds=5, query=1)


def test_what_is_done_within_a_block_is_shown_until_its_end() -> None:
    """And then what it was done within."""
    progress = Heartbeat()
    progress.enter("step 3")
    with progress.within("step 3, reading the samples of step 4"):
        assert at(progress).activity == "step 3, reading the samples of step 4"
    assert at(progress).activity == "step 3"


def test_a_message_that_a_device_waits_for_is_named_once_its_process_waits_too() -> None:
    """The first that has not come, or has failed; a process that computes is not said to wait."""
    over: list[int] = []
    progress = Heartbeat()
    progress.enter("step 3")

    def fails() -> bool:
        raise RuntimeError("the peer is gone")

    for peer in (4, 5, 6):
        progress.wait("vision->language", peer)
        progress.resume(partial(over.__contains__, peer))
    progress.wait("vision->language", 7)
    progress.resume(lambda: True)
    assert [message[1] for message in progress.unfinished] == [4, 5, 6]
    assert not at(progress).waits

    def status() -> Status:
        with patch.object(heartbeat, "_look_at", return_value=("all_reduce", (), "")):
            return at(progress)

    assert (status().peers, status().through) == ((4,), "edge vision->language, on the device")
    over += [4, 6]
    assert status().peers == (5,)
    progress.wait("audio->language", 8)
    assert (status().peers, status().through) == ((8,), "edge audio->language")
    progress.resume(fails)
    assert [message[1] for message in progress.unfinished] == [5, 6, 8]
    over += [5]
    assert status().peers == (8,)


def test_a_group_that_is_being_destroyed_has_no_ranks() -> None:
    """As it may be while the thread that watches looks at the stack."""

    def collective(group: dist.ProcessGroup) -> tuple[int, ...]:
        frame = inspect.currentframe()
        assert frame is not None
        return _ranks_of(frame)

    assert collective(dist.ProcessGroup(HashStore(), 0, 1)) == ()


def test_a_mark_outside_of_collectives_names_the_line(run_ranks: Callable[..., list[Any]]) -> None:
    """The innermost outside of torch; in a collective it names its ranks."""

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
    assert "test_launch_diagnosis, line " in inside.where


def test_each_rank_that_waits_has_a_line_and_equal_ones_share_it() -> None:
    """Those that don't wait, have left, or whose task is unknown, have none."""
    statuses = {
        0: SLEEPS,
        1: RECEIVED,
        2: GATHERS,
        3: GATHERS,
        7: RECEIVED,
        8: Status(waits=True),
        9: Status(doing="step 3", waits=True, left=True),
    }
    assert show_waits(statuses).splitlines() == [
        "ranks 1,7 waited 5.0 s in step 3, forward of language stage 0, for rank 0 (edge vision->language)",
        "rank 2 waited 61 s in step 3, forward of language stage 0, for rank 3",
        "rank 3 waited 61 s in step 3, forward of language stage 0, for rank 2",
    ]


def test_a_thousand_ranks_take_few_lines() -> None:
    """The rest is counted by name."""
    statuses = {rank: Status(doing=f"step {rank}", waits=True) for rank in range(1000)}
    lines = show_waits(statuses).splitlines()
    assert len(lines) == 17
    assert lines[-1] == "ranks 16-999 waited too"


def test_silent_ranks_are_named_with_their_last_status() -> None:
    """Or that they never stored a status."""
    assert show_silent({2}, {2: SLEEPS}) == (
        "rank 2 no longer answers: it was killed or stopped, or a machine or its network is gone. "
        "Rank 2 was last heard of in step 3."
    )
    assert show_silent({1, 2, 3}, {1: SLEEPS, 3: SLEEPS}) == (
        "ranks 1-3 no longer answer: they were killed or stopped, or a machine or its network is gone. "
        "Ranks 1,3 were last heard of in step 3; rank 2 was never heard of."
    )


def test_a_rank_that_waits_for_nobody_blocks_the_others() -> None:
    """Where all wait, the plan or a program is wrong, and no rank is named."""
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
