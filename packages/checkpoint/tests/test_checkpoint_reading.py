"""What loading reads and leaves: the blocks that are needed and no others, and nothing wrong where one is damaged."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from mimo.checkpoint import load, read_manifest, save
from mimo.checkpoint._blocks import BLOCK_BYTES, digest
from mimo.checkpoint._read_shards import count_threads, own_place
from mimo.checkpoint._tensors import DTYPES
from mimo.hooks import CheckpointError

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
BLOCK_NUMBERS = BLOCK_BYTES // 4


def count_bytes(work: Callable[[], Any]) -> int:
    """Return how many bytes ``work`` reads of shards."""
    found, real = [0], os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        count = real(file, buffers, offset)
        found[0] += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.preadv", preadv)
        work()
    return found[0]


def headers(step: Path, *, shards: int = 1) -> int:
    """Return the bytes of headers that loading from so many files reads: before anything changes, and again."""
    return 2 * shards * max(entry.header_bytes for entry in read_manifest(step).shards.values())


@pytest.mark.parametrize(
    ("shape", "placement", "most"),
    [
        ((32, BLOCK_NUMBERS // 4), Shard(0), 2),  # 8 blocks, two for each rank
        ((33, BLOCK_NUMBERS // 4), Shard(0), 4),  # which begin and end inside of blocks
        ((32, BLOCK_NUMBERS // 4), Shard(1), 8),  # some of each block
        ((2, 8 * BLOCK_NUMBERS), Shard(1), 4),  # rows of eight blocks, two of each for each rank
    ],
    ids=str,
)
def test_a_rank_reads_the_blocks_that_it_needs(
    tmp_path: Path, run_ranks: RunRanks, shape: tuple[int, ...], placement: Placement, most: int
) -> None:
    """No others, and each once, however the tensor is cut."""
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    step = save(tmp_path, 1, {"x": whole, "other": torch.ones(5 * BLOCK_NUMBERS)}, **ABOUT)

    def work(rank: int) -> None:
        assert isinstance(placement, Shard)
        part = whole.chunk(4, placement.dim)[rank]
        target = DTensor.from_local(
            torch.zeros(part.shape),
            DeviceMesh("cpu", [0, 1, 2, 3]),
            [placement],
            shape=whole.shape,
            stride=whole.stride(),
            run_check=False,
        )
        count = count_bytes(lambda: load(step, {"x": target}))
        assert torch.equal(target.to_local(), part)
        # "other" comes first in the file: what is asked for ends with a short block
        assert count <= most * BLOCK_BYTES + headers(step)

    run_ranks(4, work)


def test_files_that_hold_nothing_needed_are_not_opened(tmp_path: Path) -> None:
    """Another module's files may even be missing."""
    step = save(tmp_path, 1, {"a": torch.ones(8), "b": torch.ones(8)}, **ABOUT, shard_bytes=32)
    entry = read_manifest(step).tensors["b"].pieces[0]
    (step / entry.shard).unlink()
    target = torch.zeros(8)
    assert count_bytes(lambda: load(step, {"a": target})) == 32 + headers(step)
    assert target.all()


@pytest.mark.parametrize("count", [50, 1500])
@pytest.mark.parametrize("asked", ["all", "some", "all, of other places"])
def test_small_tensors_of_one_block_share_a_read(tmp_path: Path, count: int, asked: str) -> None:
    """A block is read once for all tensors in it, more than one read can fill, or with others between."""
    tree = {f"x{index}": torch.full((5,), float(index)) for index in range(count)}
    step = save(tmp_path, 1, tree, **ABOUT)
    names = [*tree][:: 2 if asked == "some" else 1]
    target = {name: torch.zeros(10)[::2] if "other" in asked else torch.zeros(5) for name in names}
    assert count_bytes(lambda: load(step, target)) == count * 20 + headers(step)
    assert all(torch.equal(target[name], tree[name]) for name in names)


def test_tensors_that_share_bytes_are_filled(tmp_path: Path) -> None:
    """A manifest may say that two tensors lie at one place: that is odd, but nothing of it is wrong."""
    step = save(tmp_path, 1, {"x": torch.arange(4.0), "y": torch.arange(4.0, 8.0)}, **ABOUT)
    path = step / "manifest.json"
    body = json.loads(path.read_text())["body"]
    piece = body["tensors"]["y"]["pieces"][0]
    piece["bytes"] = [at - 8 for at in piece["bytes"]]
    text = json.dumps(body)
    path.write_text('{"digest":"' + digest(text.encode()) + '","body":' + text + "}\n")
    found = {name: torch.zeros(4) for name in "xy"}
    load(step, found)
    assert torch.equal(found["x"], torch.arange(4.0))
    assert torch.equal(found["y"], torch.arange(2.0, 6.0))


def test_large_pieces_begin_where_copies_are_fast(tmp_path: Path) -> None:
    """At a multiple of 64 bytes of the file, whatever small ones there are beside them and whatever their dtypes."""
    large = {f"{code}.large": torch.zeros(64, 8, dtype=DTYPES[code]) for code in DTYPES}
    small = {f"{code}.a": torch.zeros(3, dtype=DTYPES[code]) for code in DTYPES}
    tensors = read_manifest(save(tmp_path, 1, {**large, **small}, **ABOUT)).tensors
    assert all(tensors[name].pieces[0].begin % 64 == 0 for name in large)


def test_threads_share_the_files_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read, what is damaged is named whoever finds it, and the caller hears of its own thread's blocks only."""
    tree = {f"x{index}": torch.full((50_000,), float(index)) for index in range(40)}
    step = save(tmp_path, 1, tree, **ABOUT, shard_bytes=1 << 20)
    monkeypatch.setattr("mimo.checkpoint._read_shards.PORTION_BYTES", 1 << 18)
    monkeypatch.setattr("mimo.checkpoint._load.count_threads", lambda _places: 3)
    calls: list[int] = []
    target = {name: torch.zeros(50_000) for name in tree}
    load(step, target, on_progress=lambda: calls.append(threading.get_ident()))
    assert all(torch.equal(target[name], tensor) for name, tensor in tree.items())
    assert {*calls} == {threading.get_ident()}

    (shard, *_) = sorted(step.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x11")
    with pytest.raises(CheckpointError, match=f"{shard.name} block 0: expected the checksum"):
        load(step, target)


def test_what_another_thread_finds_damaged_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the caller's own thread has read all of its portions."""
    step = save(tmp_path, 1, {"x": torch.ones(8), "y": torch.ones(8)}, **ABOUT, shard_bytes=32)
    here, found = threading.get_ident(), threading.Event()

    def read(_reader: object, _reads: object) -> None:
        if threading.get_ident() == here:
            assert found.wait(60)
            return
        found.set()
        raise CheckpointError("block", expected="right bytes", got="others")

    monkeypatch.setattr("mimo.checkpoint._read_shards.read_boxes", read)
    monkeypatch.setattr("mimo.checkpoint._load.count_threads", lambda _places: 2)
    with pytest.raises(CheckpointError, match="block: expected right bytes, got others"):
        load(step, {"x": torch.zeros(8), "y": torch.zeros(8)})


def test_ranks_share_the_cores_of_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other hosts, or bound to other cores, don't count; one thread reads in any case, and never many."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(4)))
    here = own_place()
    assert [count_threads([here] * ranks) for ranks in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 1]
    assert count_threads(["other host f", here, here]) == 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(128)))
    assert own_place() != here
    assert count_threads([here, own_place()]) == 4
    monkeypatch.setattr("mimo.checkpoint._read_shards.count_cores", lambda: 3)  # as in a container
    assert [count_threads([own_place()] * ranks) for ranks in (1, 2)] == [3, 1]


@pytest.mark.parametrize("target", ["in place", "strided", "slices"])
def test_a_damaged_block_leaves_nothing_wrong(tmp_path: Path, target: str) -> None:
    """Its numbers are zero or what they were, those of other blocks right or what they were."""
    whole = torch.arange(1.0, 1 + 4 * BLOCK_NUMBERS).reshape(4, BLOCK_NUMBERS)
    step = save(tmp_path, 1, {"x": whole}, **ABOUT)
    (path,) = step.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(-2 * BLOCK_BYTES - 1, os.SEEK_END)  # the last byte of block 1
        file.write(b"\x11")
    found = torch.full((4, BLOCK_NUMBERS), -1.0)
    if target == "strided":
        found = torch.full((BLOCK_NUMBERS, 4), -1.0).T
    elif target == "slices":
        found = torch.full((4, 2 * BLOCK_NUMBERS), -1.0)[:, ::2]
    with pytest.raises(CheckpointError, match="block 1: expected the checksum"):
        load(step, {"x": found})
    assert ((found == whole) | (found == -1)).all(dim=1).tolist() == [True, target != "in place", True, True]
    assert ((found == 0) | (found == -1))[1].all()


def test_reading_in_place_is_a_change_that_autograd_sees(tmp_path: Path) -> None:
    """A graph that needs the old numbers fails instead of using the new ones."""
    step = save(tmp_path, 1, {"x": torch.ones(4)}, **ABOUT)
    weight = torch.nn.Parameter(torch.zeros(4))
    loss = (weight * weight).sum()
    load(step, {"x": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
