"""Which communicators a rank opens for its edges where each channel has its own, and how batches begin there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mimo.schedule.runtime import channel, open_channels
from mimo.topology import Grid, Module, ModuleGraph

WORLD = 1024


def _large() -> ModuleGraph:
    """Return an encoder on 64 ranks, which feeds a language model of stages of 16 lanes and 8 tensor ranks."""
    vision = Grid(name="vision", ranks=range(64), dp=8, tp=8)
    language = Grid(name="language", ranks=range(WORLD), pp=8, dp=16, tp=8)
    modules = (Module(grid=vision, trains=(False,)), Module(grid=language, trains=(True,) * 8))
    return ModuleGraph(modules=modules, arrows=(("vision", "language"),))


def _open(_rank: int, ranks: list[int]) -> list[dict[str, list[list[int]]]]:
    """Return by rank, as each of a dry run would have it, the ranks of the communicators of each edge."""
    vars(channel)["connects_late"] = lambda _backend: True
    found = []
    for rank in ranks:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=WORLD)
        opened = open_channels(_large())
        groups = {name: [each.group for each in channels] for name, channels in opened.items()}
        found.append(
            {
                name: [dist.get_process_group_ranks(group) for group in pair if group is not None]
                for name, pair in groups.items()
                if any(pair)
            }
        )
    return found


def test_schedule_a_stage_talks_to_its_like_alone(run_ranks: Callable[..., list[Any]]) -> None:
    """At 1,024 ranks an edge within a module is two communicators of two ranks, not of the 256 at both its ends.

    An edge between modules has one of all ranks at its ends, and none for gradients where none go back.
    """
    (found,) = run_ranks(1, _open, [3, 200, 1023])
    first, inner, last = found
    assert first == {"vision->language": [[*range(128)]], "language.0-1": [[3, 131]] * 2}
    assert inner == {"language.0-1": [[72, 200]] * 2, "language.1-2": [[200, 328]] * 2}
    assert last == {"language.6-7": [[895, 1023]] * 2}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int, int]]]:
    """Messages that are sent and received, by batch: which way, with whom, how many elements."""
    seen: list[list[tuple[str, int, int]]] = []

    def start(messages: list[tuple[str, torch.Tensor, int]]) -> list[str]:
        seen.append([(way, peer, rows.numel()) for way, rows, peer in messages])
        return ["work of all"]

    monkeypatch.setattr(dist, "isend", "send")
    monkeypatch.setattr(dist, "irecv", "receive")
    monkeypatch.setattr(dist, "P2POp", lambda op, rows, peer, **_where: (op, rows, peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", start)
    return seen


def test_schedule_a_batch_is_one_call(batches: list[list[tuple[str, int, int]]]) -> None:
    """With all peers, both ways; each message is over when the batch is, and an empty one is not begun."""
    serial = channel.Channel(group=None, tag=0, is_serial=True)
    rows = [torch.zeros(number) for number in range(1, 5)]
    works: Any = serial.start([(rows[0], 1), (rows[1], 2)], [(rows[2], 2), (rows[3], 3)])
    assert works == (["work of all"] * 2, ["work of all"] * 2)
    works = serial.start([], [])
    assert works == ([], [])
    assert batches == [[("send", 1, 1), ("send", 2, 2), ("receive", 2, 3), ("receive", 3, 4)]]
