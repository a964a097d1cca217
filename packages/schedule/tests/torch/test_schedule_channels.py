"""Which communicators a rank opens for its edges where each channel has its own, and how batches begin there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d

from mimo.schedule.runtime import channel, open_channels
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

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


class CountingStore(Store):
    """A store that counts its calls, whatever prefixes are before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._store = HashStore()

    def set(self, key: str, value: str) -> None:
        """Count, and set."""
        self.calls["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Count, and get."""
        self.calls["get"] += 1
        return bytes(self._store.get(key))

    def add(self, key: str, value: int) -> int:
        """Count, and add."""
        self.calls["add"] += 1
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Count, and check."""
        self.calls["check"] += 1
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *_timeout: Any) -> None:
        """Count, and wait."""
        self.calls["wait"] += 1
        self._store.wait(keys)


def _lanes(world: int) -> ModuleGraph:
    """Return an encoder on a quarter of the ranks and a language model with experts on all, larger by lanes alone."""
    lanes = world // 32
    vision = Grid(name="vision", ranks=range(world // 4), dp=lanes, tp=8)
    language = Grid(name="language", ranks=range(world), pp=4, dp=lanes, tp=8, ep=8)
    modules = (
        Module(grid=vision, trains=(True,)),
        Module(grid=language, trains=(True,) * 4, tied=True, experts=True, overlaps=frozenset({"sums", "gathers"})),
    )
    return ModuleGraph(modules=modules, arrows=(("vision", "language"),))


def _count(_rank: int, worlds: list[int]) -> list[list[tuple[Counter[str], int]]]:
    """Return for worlds, and a rank of each stage of them, the calls of the store and the groups that it makes."""
    vars(channel)["connects_late"] = lambda _backend: True
    make, made = distributed_c10d._new_process_group_helper, list[object]()

    def count(*args: Any, **keys: Any) -> Any:
        made.append(args)
        return make(*args, **keys)

    vars(distributed_c10d)["_new_process_group_helper"] = count
    found = []
    for world in worlds:
        graph, own = _lanes(world), []
        for stage in range(4):
            store, rank = CountingStore(), world // 4 * stage + 3
            dist.destroy_process_group()
            dist.init_process_group("fake", store=store, rank=rank, world_size=world)
            store.calls.clear()
            made.clear()
            Meshes(graph, rank=rank, device_type="cpu")
            open_channels(graph)
            own.append((store.calls, len(made)))
        found.append(own)
    return found


def test_schedule_groups_cost_a_rank_the_same_in_any_world(run_ranks: Callable[..., list[Any]]) -> None:
    """Meshes and channels take two calls of the store, which number their makers, beside what backends connect by."""
    ((small, large),) = run_ranks(1, _count, [256, WORLD])
    assert small == large
    assert [calls for calls, _ in large] == [{"add": 2}] * 4
    assert max(groups for _, groups in large) <= 10, large


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
