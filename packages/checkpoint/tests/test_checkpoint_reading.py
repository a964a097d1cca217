"""What loading reads and leaves: the blocks that are needed and no others, and nothing wrong where one is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from mimo.checkpoint import load, read_manifest, save
from mimo.checkpoint._blocks import BLOCK_BYTES
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


def test_small_tensors_of_one_block_share_a_read(tmp_path: Path) -> None:
    """A block is read once for all tensors in it."""
    tree = {f"x{index}": torch.full((100,), float(index)) for index in range(50)}
    step = save(tmp_path, 1, tree, **ABOUT)
    target = {name: torch.zeros(100) for name in tree}
    assert count_bytes(lambda: load(step, target)) == 50 * 400 + headers(step)
    assert all(torch.equal(target[name], tensor) for name, tensor in tree.items())


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
