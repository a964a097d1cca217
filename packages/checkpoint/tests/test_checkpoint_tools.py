"""Offline tools: rewriting a checkpoint in other pieces, and telling two apart."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.checkpoint import (
    Differences,
    TensorDifference,
    ValueDifference,
    WriteError,
    diff,
    latest,
    load,
    read_manifest,
    reshard,
    save,
    verify,
)
from mimo.checkpoint._tensors import DTYPES
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {"run": {"seed": 1, "names": ["a", "b"]}}, "topology": {"vision": {"ranks": [0]}}}
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
SAME = Differences(only_first=(), only_second=(), kinds=(), tensors=(), values=())


def make_tree(*, blank: bool = False) -> dict[str, Any]:
    """Tensors of every dtype and of odd shapes, and values of both kinds."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 5), "row": (1, 9), "cube": (3, 2, 4), "scalar": (), "empty": (0, 3)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dtypes = {f"as_{code}": torch.tensor([0, 1, 3, 7, 2]).to(dtype) for code, dtype in DTYPES.items()}
    tree = {"vision": tensors, "dtypes": dtypes}
    if blank:
        tree = {part: {name: torch.zeros_like(one) for name, one in found.items()} for part, found in tree.items()}
    values = {"step": Common(None if blank else [math.nan, 3]), "lr": Owned(None if blank else 1e-3, "vision")}
    return {**tree, "values": values}


def assert_holds(step: Path) -> None:
    """Load a checkpoint of `make_tree` and compare every bit."""
    tree: Any = make_tree(blank=True)
    loaded: Any = load(step, tree, refuse_left=True).tree
    for part in ("vision", "dtypes"):
        for name, tensor in make_tree()[part].items():
            assert torch.equal(loaded[part][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert repr(loaded["values"]) == repr(make_tree()["values"])


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1 << 20, 24])
def test_a_resharded_checkpoint_is_the_same_in_other_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, chunk: int
) -> None:
    """Each tensor has as many pieces as asked for or rows; numbers, values, step, config and topology are kept."""
    monkeypatch.setattr("mimo.checkpoint._source.CHUNK_BYTES", chunk)
    source = save(tmp_path / "a", 4, make_tree(), **ABOUT)
    step = reshard(source, tmp_path / "b", parts=parts, shard_bytes=200)
    assert step == tmp_path / "b" / "step_00000004" == latest(tmp_path / "b")
    assert diff(source, step) == SAME
    assert_holds(step)
    verify(step)
    manifest, before = read_manifest(step), read_manifest(source)
    assert (manifest.step, manifest.config, manifest.topology) == (before.step, before.config, before.topology)
    for name, entry in manifest.tensors.items():
        rows = [piece.box.shape[0] for piece in entry.pieces if piece.box.shape]
        assert len(entry.pieces) == (min(parts, entry.shape[0]) if entry.shape else 1), name
        assert not rows or max(rows) - min(rows) <= 1
    files = [sum(piece.end - piece.begin for piece in pieces_of(manifest, shard)) for shard in manifest.shards]
    assert max(files) <= 200
    assert reshard(step, tmp_path / "c") == tmp_path / "c" / "step_00000004"
    assert diff(source, tmp_path / "c" / "step_00000004") == SAME


def pieces_of(manifest: Any, shard: str) -> list[Any]:
    """Return the pieces that a file holds."""
    return [piece for entry in manifest.tensors.values() for piece in entry.pieces if piece.shard == shard]


def test_parts_are_balanced(tmp_path: Path) -> None:
    """Tensors of one row are spread over the parts, the largest first."""
    tree = {f"x{size}": torch.ones(1, size) for size in (60, 50, 40, 30, 20, 10)}
    step = reshard(save(tmp_path / "a", 1, tree, **ABOUT), tmp_path / "b", parts=3)
    manifest = read_manifest(step)
    assert [sum(piece.box.elements for piece in pieces_of(manifest, shard)) for shard in sorted(manifest.shards)] == [
        *(70, 70, 70)
    ]


def test_columns_and_many_files_are_resharded(
    tmp_path: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that were cut by columns come out as rows, with fewer files open than there are."""
    whole = torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(1))

    def write(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        local = [*whole.chunk(4, 1), whole[:, :0]][rank].contiguous()
        tensor = DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride(), run_check=False)
        return save(tmp_path / "a", 1, {"x": tensor}, **ABOUT)

    run_ranks(4, write)
    monkeypatch.setattr("mimo.checkpoint._source._MOST_OPEN", 2)
    monkeypatch.setattr("mimo.checkpoint._source.CHUNK_BYTES", 100)
    step = reshard(tmp_path / "a" / "step_00000001", tmp_path / "b", parts=4)
    assert [piece.box.shape for piece in read_manifest(step).tensors["x"].pieces] == [
        (2, 9, 4),
        (2, 9, 4),
        *[(1, 9, 4)] * 2,
    ]

    def read(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [0, 1])
        cut = whole.chunk(2, 2)[rank]
        tensor = DTensor.from_local(torch.zeros(cut.shape), mesh, [Shard(2)], run_check=False)
        copy = DTensor.from_local(torch.zeros(whole.shape), mesh, [Replicate()], run_check=False)
        load(step, {"x": tensor})
        load(step, {"x": copy})
        assert torch.equal(tensor.to_local(), cut)
        assert torch.equal(copy.to_local(), whole)

    run_ranks(2, read)


def test_names_are_dropped_by_pattern(tmp_path: Path) -> None:
    """Tensors and values are left out; a pattern without a name is refused."""
    source = save(tmp_path / "a", 1, make_tree(), **ABOUT)
    step = reshard(source, tmp_path / "b", drop=["dtypes.*", "values.lr"])
    assert read_manifest(step).names == {f"vision.{name}" for name in make_tree()["vision"]} | {"values.step"}
    with pytest.raises(CheckpointError, match=r"drop: expected patterns that fit a name .*, got 'opt\*'"):
        reshard(source, tmp_path / "c", drop=["opt*"])
    assert not (tmp_path / "c").exists()


def test_nothing_is_resharded_over_a_checkpoint_or_from_a_damaged_one(tmp_path: Path) -> None:
    """An existing step, wrong numbers and damage are refused, and nothing is left behind."""
    source = save(tmp_path / "a", 1, make_tree(), **ABOUT)
    with pytest.raises(CheckpointError, match="step_00000001: expected a folder without this step, got one that holds"):
        reshard(source, tmp_path / "a", parts=2)
    with pytest.raises(CheckpointError, match="parts: expected at least 1, got 0"):
        reshard(source, tmp_path / "b", parts=0)
    with pytest.raises(CheckpointError, match="shard bytes: expected at least 1, got -1"):
        reshard(source, tmp_path / "b", shard_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="step_00000001: expected no failure, got FileExistsError"):
        reshard(source, tmp_path / "file")
    path = next(source.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="block 0: expected the checksum"):
        reshard(source, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["latest", "step_00000001"]


def test_a_checkpoint_that_was_moved_aside_is_not_replaced(tmp_path: Path) -> None:
    """The whole step that a dead save left under another name comes back, and is no place for a new one."""
    source = save(tmp_path / "a", 1, make_tree(), **ABOUT)
    aside = source.rename(tmp_path / "a" / ".step_00000001.replaced-00000000")
    other = shutil.copytree(aside, tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected a folder without this step"):
        reshard(other, tmp_path / "a", parts=2)
    assert diff(other, source) == SAME
    assert len(read_manifest(source).shards) == 1


def peak_kib(work: Callable[[], Any], first: Callable[[], Any]) -> int:
    """Return by how much the memory of a forked child grows at most while it does ``work``, KiB.

    It does ``first`` before, by which the libraries are in.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        first()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        work()
        os.write(write, str(memory("VmHWM") - before).encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return int(os.read(read, 99))


def memory(key: str) -> int:
    """Read one of this process' memory figures, KiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


def test_tools_hold_little_of_a_large_tensor(tmp_path: Path) -> None:
    """A tensor of 96 MiB, one row, is resharded, compared and verified with less than that in memory."""
    step = save(tmp_path / "a", 1, {"x": torch.zeros(1, 24 << 20)}, **ABOUT)
    other = save(tmp_path / "b", 1, {"x": torch.ones(1, 24 << 20)}, **ABOUT)
    small = save(tmp_path / "small", 1, {"x": torch.zeros(1)}, **ABOUT)
    for work, first in (
        (lambda: reshard(step, tmp_path / "c"), lambda: reshard(small, tmp_path / "d")),
        (lambda: diff(step, other), lambda: diff(small, small)),
        (lambda: verify(step), lambda: verify(small)),
    ):
        assert peak_kib(work, first) < 64 << 10
    grown = peak_kib(lambda: load(step, {"x": torch.ones(1, 24 << 20)}), lambda: load(small, {"x": torch.ones(1)}))
    assert 96 << 10 <= grown < 112 << 10


def test_all_differences_are_reported(tmp_path: Path) -> None:
    """Names, kinds, numbers and values, each with its place and both sides."""
    first = save(
        tmp_path / "a",
        1,
        {
            "same": torch.tensor([math.nan, 0.0, 1.0]),
            "numbers": torch.tensor([1.0, 2.0, 4.0, 8.0]),
            "shape": torch.zeros(2),
            "dtype": torch.zeros(2),
            "gone": torch.zeros(1),
            "kind": Common(1),
            "value": Common({"a": [1, 2, {"b": math.nan}], "c": 1, "e": {}}),
            "owner": Owned(1, "vision"),
        },
        **ABOUT,
    )
    second = save(
        tmp_path / "b",
        2,
        {
            "same": torch.tensor([math.nan, 0.0, 1.0]),
            "numbers": torch.tensor([1.0, 2.5, 4.0, 4.0]),
            "shape": torch.zeros(2, 1),
            "dtype": torch.zeros(2).bfloat16(),
            "new": torch.zeros(1),
            "kind": torch.zeros(1),
            "value": Common({"a": [1, 3, {"b": math.nan}, 4], "c": 1.0, "d": None, "e": []}),
            "owner": Owned(1, "language"),
        },
        config={"run": {"seed": 2, "names": ["a", "b"]}},
        topology={"vision": {"ranks": [0, 1]}},
    )
    found = diff(first, second)
    assert found
    assert found == Differences(
        only_first=("gone",),
        only_second=("new",),
        kinds=(
            ValueDifference(path="dtype", first="F32 [2]", second="BF16 [2]"),
            ValueDifference(path="kind", first="common", second="F32 [1]"),
            ValueDifference(path="owner", first="owned by vision", second="owned by language"),
            ValueDifference(path="shape", first="F32 [2]", second="F32 [2, 1]"),
        ),
        tensors=(TensorDifference(name="numbers", elements=4, differing=2, absolute=4.0, relative=0.5),),
        values=(
            ValueDifference(path="value.a[1]", first="2", second="3"),
            ValueDifference(path="value.a[3]", first="nothing", second="4"),
            ValueDifference(path="value.c", first="1", second="1.0"),
            ValueDifference(path="value.e", first="{}", second="[]"),
            ValueDifference(path="value.d", first="nothing", second="null"),
            ValueDifference(path="step", first="1", second="2"),
            ValueDifference(path="config.run.seed", first="1", second="2"),
            ValueDifference(path="topology.vision.ranks[1]", first="nothing", second="1"),
        ),
    )


@pytest.mark.parametrize(
    ("first", "second", "differing", "absolute", "relative"),
    [
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0, 0, 0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), 1, math.inf, math.inf),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), 1, math.inf, math.inf),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0, 0),
        (torch.tensor([1e-300], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64), 1, 1e-300, 1),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1, 1, 2.0**-60),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 1, 2.0**64, 2),
        (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**63 + 3], dtype=torch.uint64), 1, 3, 3 * 2.0**-63),
        (torch.tensor([0, 2], dtype=torch.uint64), torch.tensor([2**63, 2], dtype=torch.uint64), 1, 2.0**63, 1),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1, 1),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn), 1, 2, 0.5),
        (torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.uint8), 1, 255, 1),
    ],
    ids=str,
)
def test_numbers_are_compared_by_bits_and_measured(
    tmp_path: Path, first: torch.Tensor, second: torch.Tensor, differing: int, absolute: float, relative: float
) -> None:
    """NaN equals the same NaN, zeros of both signs differ by nothing, large integers by what they do."""
    steps = [save(tmp_path, step, {"x": x}, **ABOUT) for step, x in enumerate((first, second))]
    found = diff(*steps).tensors
    assert bool(found) == bool(differing)
    for one in found:
        assert (one.differing, one.absolute, one.relative) == (differing, absolute, relative)


def test_a_difference_in_any_chunk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed number is found wherever it lies, in whatever pieces both checkpoints are."""
    monkeypatch.setattr("mimo.checkpoint._source.CHUNK_BYTES", 40)
    whole = torch.arange(60.0).reshape(12, 5)
    first = reshard(save(tmp_path / "a", 1, {"x": whole}, **ABOUT), tmp_path / "b", parts=5)
    for at in (0, 9, 10, 31, 59):
        changed = whole.clone()
        changed.view(-1)[at] += 1
        second = save(tmp_path / "c", at, {"x": changed}, **ABOUT)
        (found,) = diff(first, second).tensors
        assert (found.differing, found.absolute) == (1, 1.0)
