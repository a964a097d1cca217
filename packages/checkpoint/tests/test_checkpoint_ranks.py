"""Saving on some ranks and loading on others: placements, replicas, owners, disagreements and failures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mimo.checkpoint import _writer, latest, load, read_manifest, save, verify
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {"a": 1}, "topology": {}}
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor whose values follow from its name and place."""
    seed = sum(name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = {"weight": (5, 6), "tiny": (1, 3), "experts": (3, 2, 7)}


def make_meshes(grids: dict[str, tuple[int, ...]]) -> dict[str, DeviceMesh]:
    """Make each module's one-axis mesh, on every rank in one order."""
    return {name: DeviceMesh("cpu", list(ranks), mesh_dim_names=("tp",)) for name, ranks in grids.items()}


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a tensor that every rank has, without a message; a rank outside the mesh holds nothing of it."""
    local = tensor
    for axis, placement in enumerate(placements):
        place = mesh.get_coordinate()
        if isinstance(placement, Shard) or place is None:
            dim = placement.dim if isinstance(placement, Shard) else 0
            chunks = local.chunk(mesh.size(axis), dim)
            index = len(chunks) if place is None else place[axis]
            local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def make_tree(meshes: dict[str, DeviceMesh], placement: Placement, *, blank: bool = False) -> dict[str, Any]:
    """Make the entries of the modules that this rank holds, filled, or blank for loading."""
    tree: dict[str, Any] = {"step": Common(0 if blank else 7)}
    for module, mesh in meshes.items():
        if mesh.get_coordinate() is None:
            continue
        tensors = {name: whole(f"{module}.{name}", shape) for name, shape in SHAPES.items()}
        parameters = {name: distribute(tensor, mesh, [placement]) for name, tensor in tensors.items()}
        moments = {name: {"step": torch.tensor(4.0), "avg": tensor * 2} for name, tensor in parameters.items()}
        tree[module] = parameters
        tree[f"optimizer.{module}"] = {
            "moments": moments,
            "settings": Owned(None if blank else {"lr": module}, module),
        }
    if blank:
        for tensor in find_tensors(tree).values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
    return tree


def find_tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Flatten the tensors of a tree."""
    if isinstance(tree, dict):
        return {k: v for key, below in tree.items() for k, v in find_tensors(below, f"{path}.{key}").items()}
    return {path[1:]: tree} if isinstance(tree, torch.Tensor) else {}


def assert_same(found: Any, expected: Any) -> None:
    """Compare the local shards of two trees bit by bit."""
    tensors = find_tensors(found)
    assert tensors.keys() == find_tensors(expected).keys()
    for name, tensor in find_tensors(expected).items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        other = tensors[name]
        assert torch.equal(other.to_local() if isinstance(other, DTensor) else other, local), name


SAVED: dict[str, tuple[int, ...]] = {"vision": (0, 1), "language": (2, 3)}


GRIDS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"vision": (0,), "language": (0,)},
    {"vision": (0, 1, 2), "language": (1, 2)},
    {"language": (0, 2)},
    {"vision": (3,), "language": (0, 1, 2, 3)},
)


@pytest.mark.parametrize(
    ("grids", "placement"),
    [
        pytest.param(grids, placement, marks=() if (number + place) % 3 == 0 else pytest.mark.soak)
        for number, grids in enumerate(GRIDS)
        for place, placement in enumerate((Shard(0), Shard(1), Replicate()))
    ],
    ids=str,
)
def test_disjoint_modules_load_into_any_grid(
    tmp_path: Path, run_ranks: RunRanks, grids: dict[str, tuple[int, ...]], placement: Placement
) -> None:
    """Saved on two grids with tp 2, each module loads into another grid, uneven and empty shards included."""
    before = Shard(1 - placement.dim) if isinstance(placement, Shard) else Shard(0)
    run_ranks(4, lambda rank: save(tmp_path, 1, make_tree(make_meshes(SAVED), before), **ABOUT))
    world = max(rank for ranks in grids.values() for rank in ranks) + 1

    def read(rank: int) -> Any:
        meshes = make_meshes(grids)
        found = load(tmp_path / "step_00000001", make_tree(meshes, placement, blank=True)).tree
        assert_same(found, make_tree(meshes, placement))
        assert found["step"] == Common(7)
        for module in (module for module, ranks in grids.items() if rank in ranks):
            state: Any = found[f"optimizer.{module}"]
            assert state["settings"] == Owned({"lr": module}, module)

    run_ranks(world, read)


def test_one_rank_reads_and_writes_the_same_values_as_many(tmp_path: Path, run_ranks: RunRanks) -> None:
    """What four ranks saved is whole for one process without DTensors, and each element is stored once."""
    run_ranks(4, lambda rank: save(tmp_path, 1, make_tree(make_meshes(SAVED), Shard(0)), **ABOUT))
    target = {f"{module}.{name}": torch.zeros(shape) for module in SAVED for name, shape in SHAPES.items()}
    load(tmp_path / "step_00000001", target)
    for name, tensor in target.items():
        assert torch.equal(tensor, whole(name, tuple(tensor.shape))), name
    manifest = read_manifest(tmp_path / "step_00000001")
    assert [piece.box.shape for piece in manifest.tensors["vision.weight"].pieces] == [(3, 6), (2, 6)]
    assert [piece.box.shape for piece in manifest.tensors["vision.tiny"].pieces] == [(1, 3)]
    assert verify(tmp_path / "step_00000001").shards == 4


def test_replicas_are_written_once_and_shared_out(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Plain and replicated tensors are stored once, by ranks that share the work."""

    def work(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1, 2])
        tree = {f"x{index}": whole(f"x{index}", (100,)) for index in range(6)}
        tree |= {f"y{index}": distribute(whole("y", (50, 2)), mesh, [Replicate()]) for index in range(3)}
        save(tmp_path, 1, tree, **ABOUT)

    run_ranks(3, work)
    manifest = read_manifest(tmp_path / "step_00000001")
    assert all(len(entry.pieces) == 1 for entry in manifest.tensors.values())
    sizes = [entry.bytes - entry.header_bytes for entry in manifest.shards.values()]
    assert sizes == [1200, 1200, 1200]


def test_two_axes_and_overlapping_meshes_load(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Tensors cut along two dims, over meshes that share ranks, load whole and into other cuts."""

    def write(rank: int) -> None:
        square, pair = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [1, 2])
        tree: dict[str, Any] = {"a": distribute(whole("a", (5, 7)), square, [Shard(0), Shard(1)])}
        tree["c"] = distribute(whole("c", (7,)), square, [Shard(0), Shard(0)])
        if rank in (1, 2):
            tree["b"] = distribute(whole("b", (3, 4, 5)), pair, [Shard(2)])
        save(tmp_path, 1, tree, **ABOUT)

    def read(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1, 2])
        shapes = {"a": (5, 7), "b": (3, 4, 5), "c": (7,)}
        for dim in range(2):
            tree = {
                name: distribute(torch.zeros(shape), mesh, [Shard(min(dim, len(shape) - 1))])
                for name, shape in shapes.items()
            }
            load(tmp_path / "step_00000001", tree)
            for name, shape in shapes.items():
                assert torch.equal(tree[name].full_tensor(), whole(name, shape))

    run_ranks(4, write)
    run_ranks(3, read)


def test_strided_shards_of_two_axes_load(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A dim cut first by tensor ranks, then by data shards, as FSDP2 does it, is stored where it belongs."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def write(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        # Mesh rank (fsdp, tp) holds block 2·tp + fsdp of the four.
        local = whole("x", (8, 3)).chunk(4)[2 * (rank % 2) + rank // 2]
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        tensor = DTensor.from_local(local, mesh, placements, shape=torch.Size((8, 3)), stride=(3, 1), run_check=False)
        save(tmp_path, 1, {"x": tensor}, **ABOUT)
        gap = DTensor.from_local(
            torch.zeros(2, 3),
            DeviceMesh("cpu", [[0, 1, 2, 3]]),
            [Replicate(), _StridedShard(0, split_factor=2)],
            shape=torch.Size((8, 3)),
            stride=(3, 1),
            run_check=False,
        )
        with pytest.raises(
            CheckpointError, match=r"x: expected a shard that is one contiguous box .* gaps along dim 0"
        ):
            save(tmp_path, 2, {"x": gap}, **ABOUT)

    run_ranks(4, write)
    target = torch.zeros(8, 3)
    load(tmp_path / "step_00000001", {"x": target})
    assert torch.equal(target, whole("x", (8, 3)))


def test_a_sum_that_is_not_done_is_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A partial DTensor has no value yet."""

    def work(rank: int) -> None:
        tensor = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Partial()])
        with pytest.raises(
            CheckpointError, match=r"x: expected a DTensor that is sharded or replicated.* on rank 0, 1"
        ):
            save(tmp_path, 1, {"x": tensor}, **ABOUT)

    run_ranks(2, work)


def test_ranks_that_hold_nothing_take_part(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Ranks in gaps save and load an empty tree; rank 0 may be one."""
    run_ranks(3, lambda rank: save(tmp_path, 1, {"x": torch.ones(3)} if rank == 2 else {}, **ABOUT))

    def read(rank: int) -> None:
        target = torch.zeros(3)
        assert load(tmp_path / "step_00000001", {"x": target} if rank == 1 else {}).tree.keys() == (
            {"x"} if rank == 1 else set()
        )
        assert target.sum() == (3 if rank == 1 else 0)

    run_ranks(3, read)


def test_owned_and_common_values_reach_other_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A value that only one module's ranks gave is found by whoever asks, on ranks that did not have it."""

    def write(rank: int) -> None:
        tree: dict[str, Any] = {"seed": Common({"b": 1, "a": [2]}) if rank == 0 else Common({"a": [2], "b": 1})}
        if rank > 0:
            tree["vision"] = {"lr": Owned(0.25, "vision")}
        save(tmp_path, 1, tree, **ABOUT)

    run_ranks(3, write)

    def read(rank: int) -> Any:
        tree = {"vision": {"lr": Owned(None, "vision")}, "seed": Common(None)}
        return load(tmp_path / "step_00000001", tree if rank == 0 else {"seed": Common(None)}).tree

    first, second = run_ranks(2, read)
    assert first == {"vision": {"lr": Owned(0.25, "vision")}, "seed": Common({"a": [2], "b": 1})}
    assert second == {"seed": Common({"a": [2], "b": 1})}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((Common(1), Common(2)), r"k: expected the same on every rank .*got 1 on rank 0 and 2 on rank 2\."),
        ((Common(1), Common(1.0)), r"got 1 on rank 0 and 1\.0 on rank 2"),
        ((Owned([1], "a"), Owned([2], "a")), r"got \[1\] \(owned by a\) on rank 0 and \[2\] \(owned by a\) on rank 2"),
        ((Owned(1, "a"), Owned(1, "b")), r"got 1 \(owned by a\) on rank 0 and 1 \(owned by b\) on rank 2"),
        ((Common(1), Owned(1, "a")), r"got 1 on rank 0 and 1 \(owned by a\) on rank 2"),
        ((torch.zeros(2), torch.zeros(3)), r"got torch\.float32 \[2\] on rank 0 and torch\.float32 \[3\] on rank 2"),
        ((torch.zeros(2), torch.zeros(2).int()), r"torch\.float32 \[2\] on rank 0 and torch\.int32 \[2\] on rank 2"),
        ((torch.zeros(2), Common(1)), r"got a tensor on rank 0 and a JSON value on rank 2"),
    ],
    ids=str,
)
def test_ranks_that_disagree_are_named(
    tmp_path: Path, run_ranks: RunRanks, values: tuple[Any, Any], message: str
) -> None:
    """Two values, owners, shapes, dtypes or kinds under one name are refused on every rank, both ranks named."""

    def work(rank: int) -> None:
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "all", 1, {1: {}, 0: {"k": values[0]}, 2: {"k": values[1]}}[rank], **ABOUT)

    run_ranks(3, work)
    assert not (tmp_path / "all").exists()


def test_pieces_of_different_cuts_are_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Copies of a tensor that are cut differently on two meshes can't be distinguished, so they are refused."""

    def work(rank: int) -> None:
        meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        mine, placement = (meshes[0], Shard(0)) if rank < 2 else (meshes[1], Replicate())
        with pytest.raises(CheckpointError, match=r"x: .*a piece of \[2\] at \[0\] on rank 0 and a piece of \[4\]"):
            save(tmp_path, 1, {"x": distribute(torch.ones(4), mine, [placement])}, **ABOUT)

    run_ranks(4, work)


def test_a_missing_piece_is_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A tensor of which one rank's shard is not given is never saved in part."""

    def work(rank: int) -> None:
        tensor = distribute(torch.ones(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        with pytest.raises(
            CheckpointError, match=r"expected pieces that make up each tensor exactly once, got .*key:x"
        ):
            save(tmp_path, 1, {"x": tensor} if rank == 0 else {}, **ABOUT)

    run_ranks(2, work)


def test_steps_and_configs_must_agree(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Ranks that are at different steps, or run different configs, don't make one checkpoint."""

    def work(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"step: expected the same .*got 1 on rank 0 and 2 on rank 1"):
            save(tmp_path, 1 + rank, {}, **ABOUT)
        with pytest.raises(CheckpointError, match=r"config: expected the same .*rank 1"):
            save(tmp_path, 1, {}, config={"rank": rank}, topology={})

    run_ranks(2, work)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failing_rank_fails_all_and_commits_nothing(tmp_path: Path, run_ranks: RunRanks, bad: int) -> None:
    """One rank's failure, while planning or writing, raises on all with the rank named; the old step stays latest."""
    run_ranks(3, lambda rank: save(tmp_path, 1, {f"x{rank}": torch.ones(4)}, **ABOUT))

    def work(rank: int) -> None:
        with pytest.raises(CheckpointError, match=rf"bad: expected a tensor.*got a builtins\.object on rank {bad}\."):
            save(tmp_path, 2, {"bad": object()} if rank == bad else {"x": torch.ones(1)}, **ABOUT)
        if rank == bad:
            setattr(_writer, "view_bytes", lambda tensor: 1 // 0)  # noqa: B010  # this is a forked process
        with pytest.raises(CheckpointError, match=rf"step_00000002: .*ZeroDivisionError.* on rank {bad}\.") as caught:
            save(tmp_path, 2, {f"x{rank}": torch.ones(4)}, **ABOUT)
        assert "view_bytes" in "".join(caught.value.__notes__)

    run_ranks(3, work)
    assert latest(tmp_path) == tmp_path / "step_00000001"
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step_00000001"]


def test_a_failing_commit_fails_all(tmp_path: Path, run_ranks: RunRanks) -> None:
    """When rank 0 can't commit, every rank hears why."""

    def work(rank: int) -> None:
        Path.rename = None  # type: ignore[method-assign,assignment]  # this is a forked process
        with pytest.raises(CheckpointError, match="step_00000001: expected no failure, got TypeError"):
            save(tmp_path, 1, {f"x{rank}": torch.ones(4)}, **ABOUT)

    run_ranks(2, work)
    assert latest(tmp_path) is None


def test_misfits_of_all_ranks_are_listed_together(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Each rank hears of what any rank can't load, and no rank's tensors change."""
    run_ranks(2, lambda rank: save(tmp_path, 1, {f"x{rank}": torch.ones(4)}, **ABOUT))

    def work(rank: int) -> None:
        target = torch.zeros(4)
        tree = {f"x{rank}": target, f"lost{rank}": torch.zeros(1)}
        with pytest.raises(CheckpointError, match=r"2 that do not fit:\n  lost0: missing\n  lost1: missing"):
            load(tmp_path / "step_00000001", tree)
        assert not target.any()
        with pytest.raises(CheckpointError, match="1 that do not fit:\n  x1: unexpected"):
            load(tmp_path / "step_00000001", {"x0": target} if rank else {}, refuse_left=True)

    run_ranks(2, work)


def test_damage_that_one_rank_reads_raises_on_all(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A damaged block that only one rank needs ends the loading of all, file and block named."""
    run_ranks(2, lambda rank: save(tmp_path, 1, {f"x{rank}": torch.ones(4)}, **ABOUT))
    path = tmp_path / "step_00000001" / "rank_00001_0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    message = re.escape(f"{path} block 0") + ": expected the checksum .* on rank 0"

    def work(rank: int) -> None:
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "step_00000001", {f"x{1 - rank}": torch.zeros(4)})

    run_ranks(2, work)


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    """All ranks load one checkpoint."""
    for step in (1, 2):
        save(tmp_path, step, {"x": torch.full((4,), float(step))}, **ABOUT)

    def work(rank: int) -> None:
        with pytest.raises(CheckpointError, match="expected the same checkpoint on every rank"):
            load(tmp_path / f"step_0000000{1 + rank}", {"x": torch.zeros(4)})

    run_ranks(2, work)


def test_no_more_than_six_meetings_save_and_two_load(tmp_path: Path, run_ranks: RunRanks) -> None:
    """The number of collectives, two for each thing that is said, does not grow with the tree."""

    def work(rank: int) -> list[str]:
        calls: list[str] = []

        def count(name: str) -> None:
            real = getattr(dist, name)

            def counted(*args: Any, **more: Any) -> Any:
                calls.append(name)
                return real(*args, **more)

            setattr(dist, name, counted)

        for name in ("gather", "scatter", "broadcast", "all_gather", "barrier"):
            count(name)
        save(tmp_path, 1, {f"x{index}": torch.ones(4) for index in range(20)}, **ABOUT)
        load(tmp_path / "step_00000001", {f"x{index}": torch.ones(4) for index in range(20)})
        return calls

    for calls in run_ranks(2, work):
        planning, writing = (
            ["all_gather", "gather", "broadcast", "scatter"],
            ["all_gather", "gather"] + ["broadcast"] * 2,
        )
        assert calls == planning + writing * 2 + ["all_gather", "all_gather"] * 2


def test_each_shard_is_plain_safetensors(tmp_path: Path, run_ranks: RunRanks) -> None:
    """The safetensors library reads every piece under the tensor's own name."""
    run_ranks(4, lambda rank: save(tmp_path, 1, make_tree(make_meshes(SAVED), Shard(0)), **ABOUT))
    with safe_open(tmp_path / "step_00000001" / "rank_00003_0000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("language.weight"), whole("language.weight", (5, 6))[3:])
