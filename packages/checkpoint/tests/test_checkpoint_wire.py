"""What ranks say to each other before and after files are written: plain data, bounded, and nothing of it pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mimo.checkpoint import WriteError, _wire, load, save
from mimo.checkpoint._agree import RECORDS, Offer, Record, Value
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._manifest import SHARD_ENTRIES, ShardEntry
from mimo.checkpoint._matching import REQUESTS, Request
from mimo.checkpoint._plan import OFFERS
from mimo.checkpoint._ranks import Failure, Ranks
from mimo.checkpoint._wire import PLAIN, Wire
from mimo.checkpoint._writer import LAYOUTS, Cut, lay_out
from mimo.hooks import CheckpointError

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
RunRanks = Callable[..., list[Any]]

CUTS = [
    Cut(name="a.b", box=Box((0, 4), (2, 3)), dtype=torch.bfloat16),
    Cut(name="é", box=Box((), ()), dtype=torch.float64),
    Cut(name="c", box=Box((7,), (30,)), dtype=torch.int8),
]
REQUEST = Request(
    identity="0f",
    names={"a": "b"},
    lacking=frozenset({"x", "y"}),
    misfits={"c": "expected this"},
    renamed={"a": True},
    place="m 1",
)


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        (LAYOUTS, lay_out(3, CUTS, shard_bytes=16)),
        (LAYOUTS, ()),
        (REQUESTS, REQUEST),
        (
            RECORDS,
            Record(values={"a": Value(text="1", module=None), "b": Value(text="[]", module="m")}, about={"s": "1"}),
        ),
        (SHARD_ENTRIES, {"x": ShardEntry(bytes=9, header_bytes=8, header_checksum="00", blocks=("1", "2"))}),
        (OFFERS, Offer(plan=OFFERS.unpack({"items": [], "values": []}).plan, values=frozenset({"v"}))),
    ],
)
def test_what_is_said_comes_back_as_it_was(wire: Wire[Any], value: Any) -> None:
    """Through the text that travels."""
    assert wire.unpack(json.loads(json.dumps(wire.pack(value)))) == value


def _talk(rank: int) -> list[Any]:
    """Return what ranks hear of each other, each kind of meeting once, of lengths that differ."""
    ranks, text = Ranks.current(), "é" * 10**rank
    failure = Failure(rank=rank, where="w", expected="e", got="\udcff", fix="f", trace="t", kind=WriteError)
    return [
        ranks.gather(text, PLAIN),
        ranks.gather_everywhere(failure if rank == 1 else text, PLAIN),
        ranks.scatter([None, failure, text] if rank == 0 else [], PLAIN),
        ranks.share(text if rank == 0 else None, PLAIN),
    ]


def test_values_and_failures_travel_whatever_their_length(run_ranks: RunRanks) -> None:
    """A failure arrives as what it was, with its kind and its traceback's text."""
    texts = ["é" * 10**rank for rank in range(3)]
    failures = [
        Failure(rank=rank, where="w", expected="e", got="\udcff", fix="f", trace="t", kind=WriteError)
        for rank in (0, 1)
    ]
    for rank, (gathered, everywhere, scattered, shared) in enumerate(run_ranks(3, _talk)):
        assert gathered == ([] if rank else texts)
        assert everywhere == [texts[0], failures[1], texts[2]]
        assert scattered == [None, failures[0], texts[0]][rank]
        assert shared == texts[0]


def _misspeak(rank: int, most: int | None) -> str:
    """Return what is raised where rank 1 says what is too long or no message."""
    ranks = Ranks.current()
    if most is not None:
        vars(_wire)["MAX_BYTES"] = most  # this is a forked process
    elif rank == 1:
        vars(_wire)["_to_bytes"] = lambda _value, _device: torch.full((100_000,), ord("["), dtype=torch.uint8)
    try:
        (first, second) = ranks.gather_everywhere("x" * 50 * (1 + rank), PLAIN)
    except CheckpointError as error:
        return str(error)
    assert first == "x" * 50
    assert isinstance(second, Failure)
    return str(second.error())


@pytest.mark.parametrize(
    ("most", "text"),
    [
        (200, "expected at most 200 bytes for what 2 ranks exchange about it, got up to 110 bytes for each"),
        (None, "expected from every rank what the same release of mimo-checkpoint says, got something else"),
    ],
)
def test_what_is_too_long_or_no_message_is_refused_on_all_ranks(
    run_ranks: RunRanks, most: int | None, text: str
) -> None:
    """Before room is made for the first, and naming the rank of the second."""
    found = run_ranks(2, lambda rank: _misspeak(rank, most))
    assert found[0] == found[1]
    assert text in found[0]


def _say_no_json(rank: int) -> list[tuple[str, str]]:
    """Return what is raised, and its cause, where one rank's value is no JSON, each kind of meeting once."""
    ranks, bad = Ranks.current(), object()
    meetings: list[Callable[[], object]] = [
        lambda: ranks.gather(bad if rank else "", PLAIN),
        lambda: ranks.gather_everywhere(bad if rank else "", PLAIN),
        lambda: ranks.scatter([] if rank else ["", bad], PLAIN),
        lambda: ranks.share(None if rank else bad, PLAIN),
    ]
    found = []
    for meet in meetings:
        with pytest.raises(CheckpointError) as refused:
            meet()
        found.append((str(refused.value), type(refused.value.__cause__).__name__))
    return found


def test_what_is_no_json_is_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    """Nobody waits for the rank that can't say it; that rank also names what is wrong with it."""
    for rank, found in enumerate(run_ranks(2, _say_no_json)):
        assert all("expected plain JSON data in what ranks exchange about it" in text for text, _ in found)
        causes = ["TypeError" if one == rank else "NoneType" for one in (1, 1, 0, 0)]
        assert [cause for _, cause in found] == causes


def test_nothing_is_pickled_between_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Saving and loading shards and replicas, and a failure of one rank, use none of what torch pickles with."""

    def refuse(*_args: object, **_keys: object) -> Any:
        raise AssertionError("an object was pickled")

    def work(rank: int) -> tuple[bool, str]:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            vars(distributed_c10d)[name] = refuse  # this is a forked process
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(24.0).view(6, 4)
        tree = {
            "cut": distribute_tensor(whole, mesh, [Shard(0)]),
            "copy": distribute_tensor(whole, mesh, [Replicate()]),
            f"own{rank}": torch.ones(3),
        }
        group = dist.new_group(backend="gloo")
        folder = save(tmp_path, 1, tree, group=group, **ABOUT)
        found = {"cut": distribute_tensor(whole * 0, mesh, [Shard(1)]), "copy": whole * 0}
        load(folder, found, group=group)
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 2, {"x": object() if rank else torch.ones(1)}, **ABOUT)
        cut = found["cut"]
        assert isinstance(cut, DTensor)
        return torch.equal(cut.full_tensor(), whole) and torch.equal(found["copy"], whole), str(error.value)

    (fine, refused), other = run_ranks(2, work)
    assert (fine, refused) == other
    assert fine
    assert refused.startswith("x: expected")
