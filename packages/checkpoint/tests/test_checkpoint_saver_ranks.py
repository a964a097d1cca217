"""A `Saver` on several ranks: they plan, skip and fail together, share the work, and none waits for another in vain."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mimo.checkpoint import Saver, WriteError, _saver, _writer, latest, load, read_manifest, save, verify
from mimo.checkpoint._blocks import checksum
from mimo.checkpoint._plan import share_out
from mimo.checkpoint._save import write_together
from mimo.checkpoint._staging import Staging
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
PLANNING = ["all_gather", "gather", "broadcast", "scatter"]
WRITING = ["all_gather", "gather", "broadcast", "broadcast"] * 2


def listen() -> list[str]:
    """Return the names of collectives called from now on; this is a forked process."""
    calls: list[str] = []

    def count(name: str) -> None:
        real = getattr(dist, name)

        def counted(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more)

        setattr(dist, name, counted)

    for name in ("gather", "scatter", "broadcast", "all_gather", "barrier"):
        count(name)
    count("all_reduce")
    return calls


def make(mesh: DeviceMesh, placement: Placement, value: float) -> DTensor:
    """Make a tensor of 4 x 4 on two ranks, each element its place times ``value``."""
    whole = torch.arange(16.0).view(4, 4) * value
    local = whole.chunk(2, placement.dim)[mesh.get_local_rank()] if isinstance(placement, Shard) else whole
    return DTensor.from_local(local.clone(), mesh, [placement], run_check=False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unchanged_structure_costs_one_all_reduce_beside_the_writing(
    tmp_path: Path,
    run_ranks: RunRanks,
    asynchronous: bool,
) -> None:
    """The first save plans, the second does not, and one that has changed on a single rank makes all plan."""

    def work(rank: int) -> list[list[str]]:
        saver, found = Saver(tmp_path, asynchronous=asynchronous), []
        calls = listen()
        tree: dict[str, Any] = {f"x{rank}.{index}": torch.ones(4) for index in range(20)}
        for step in range(1, 6):
            if step == 3 and rank == 1:
                tree["fault"] = Owned(step, "vision")
            for tensor in tree.values():
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(step)
            saver.save(step, tree, **ABOUT)
            saver.wait()
            found.append([*calls])
            calls.clear()
        saver.close()
        return found

    for calls in run_ranks(2, work):
        known = ["all_reduce", *WRITING]
        assert calls == [["all_reduce", *PLANNING, *WRITING], known, ["all_reduce", *PLANNING, *WRITING], known, known]
    for step in range(1, 6):
        folder = tmp_path / f"step_0000000{step}"
        target = {f"x{rank}.{index}": torch.zeros(4) for rank in (0, 1) for index in range(20)}
        load(folder, target)
        assert all((tensor == step).all() for tensor in target.values())
        assert set(read_manifest(folder).owned) == ({"fault"} if step >= 3 else set())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_placement_is_planned_anew(tmp_path: Path, run_ranks: RunRanks, asynchronous: bool) -> None:
    """Cut otherwise, along a dim of the same length too, each piece is saved where it now belongs."""
    placements = [Shard(0), Shard(0), Shard(1), Replicate(), Shard(1)]

    def work(rank: int) -> None:
        mesh, saver = DeviceMesh("cpu", [0, 1]), Saver(tmp_path, asynchronous=asynchronous)
        for step, placement in enumerate(placements, start=1):
            tensor = make(mesh, placement, step)
            saver.save(step, {"x": tensor}, **ABOUT)
            tensor.to_local().fill_(-1)
        saver.close()

    run_ranks(2, work)
    for step in range(1, 6):
        target = torch.zeros(4, 4)
        load(tmp_path / f"step_0000000{step}", {"x": target})
        assert torch.equal(target, torch.arange(16.0).view(4, 4) * step), step


def test_pieces_that_change_places_are_planned_anew(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Cut along another axis of the mesh, or on a mesh of another order, shards have the shape that they had before."""
    rows, columns = (Shard(0), Replicate()), (Replicate(), Shard(0))
    steps = [([[0, 1], [2, 3]], rows), ([[0, 1], [2, 3]], columns), ([[0, 2], [1, 3]], columns)]

    def work(rank: int) -> None:
        saver = Saver(tmp_path)
        for step, (ranks, placements) in enumerate(steps, start=1):
            mesh = DeviceMesh("cpu", ranks)
            half = mesh.get_local_rank(0 if placements is rows else 1)
            local = (torch.arange(16.0).view(4, 4) * step).chunk(2)[half].clone()
            saver.save(step, {"x": DTensor.from_local(local, mesh, placements, run_check=False)}, **ABOUT)
        saver.close()

    run_ranks(4, work)
    for step in (1, 2, 3):
        target = torch.zeros(4, 4)
        load(tmp_path / f"step_0000000{step}", {"x": target})
        assert torch.equal(target, torch.arange(16.0).view(4, 4) * step), step


def test_an_entry_that_goes_over_to_another_rank_is_found(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Another mesh, or another holder of a plain tensor, is another structure."""

    def work(rank: int) -> None:
        meshes, saver = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])], Saver(tmp_path)
        for step in (1, 2, 3, 4):
            mesh, holder = meshes[step // 3], step // 3 + 1
            tree: dict[str, Any] = {"x": make(mesh, Shard(0), step)} if mesh.get_coordinate() is not None else {}
            saver.save(step, tree | ({"y": torch.full((3,), float(step))} if rank == holder else {}), **ABOUT)
        saver.close()

    run_ranks(3, work)
    for step in (1, 2, 3, 4):
        target = {"x": torch.zeros(4, 4), "y": torch.zeros(3)}
        load(tmp_path / f"step_0000000{step}", target)
        assert torch.equal(target["x"], torch.arange(16.0).view(4, 4) * step)
        assert (target["y"] == step).all()


def test_ranks_skip_together(tmp_path: Path, run_ranks: RunRanks) -> None:
    """If one of them is still busy none saves; when it has ended all do."""

    def work(rank: int) -> list[bool]:
        saver, free = Saver(tmp_path, asynchronous=True, when_busy="skip"), threading.Event()

        def late(*args: Any, **more: Any) -> Any:
            outcome = write_together(*args, **more)
            assert free.wait(60)
            return outcome

        if rank == 1:
            setattr(_saver, "write_together", late)  # noqa: B010  # this is a forked process
        saved = [saver.save(1, {f"x{rank}": torch.ones(4)}, **ABOUT)]
        if rank != 1:
            saver.wait()
        saved.append(saver.save(2, {f"x{rank}": torch.ones(4)}, **ABOUT))
        free.set()
        saver.wait()
        saved.append(saver.save(3, {f"x{rank}": torch.ones(4)}, **ABOUT))
        saver.close()
        return [folder is not None for folder in saved]

    assert run_ranks(3, work) == [[True, False, True]] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000003"]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_full_disk_on_one_rank_is_reported_on_all(tmp_path: Path, run_ranks: RunRanks, bad: int) -> None:
    """Nothing is committed or left, no rank waits in vain, and the next save works."""

    def work(rank: int) -> None:
        saver = Saver(tmp_path, asynchronous=True)
        saver.save(1, {f"x{rank}": torch.ones(4)}, **ABOUT)
        saver.wait()

        def fail(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        if rank == bad:
            setattr(_writer, "checksum", fail)  # noqa: B010  # this is a forked process
        saver.save(2, {f"x{rank}": torch.ones(4)}, **ABOUT)
        saver.wait()
        failure = saver.take_failure()
        assert isinstance(failure, WriteError)
        assert f"got OSError: [Errno 28] No space left on device on rank {bad}. Older" in str(failure)
        assert saver.take_failure() is None
        assert not list(tmp_path.glob("*0002*"))
        setattr(_writer, "checksum", checksum)  # noqa: B010
        saver.save(3, {f"x{rank}": torch.full((4,), 3.0)}, **ABOUT)
        saver.close()
        assert saver.take_failure() is None

    run_ranks(3, work)
    verify(tmp_path / "step_00000001")
    verify(tmp_path / "step_00000003")


def test_a_folder_that_ranks_do_not_share_is_a_mistake(tmp_path: Path, run_ranks: RunRanks) -> None:
    """It is none of a disk's failures, past which a run would train on without ever saving."""

    def work(rank: int) -> None:
        place = tmp_path / str(rank)
        place.mkdir()
        os.chdir(place)  # this is a forked process
        with pytest.raises(
            CheckpointError,
            match=r"checkpoints: expected a folder that all ranks share, got no \.step_00000001\.partial-.* on rank 1",
        ) as caught:
            save(Path("checkpoints"), 1, {f"x{rank}": torch.ones(4)}, **ABOUT)
        assert not isinstance(caught.value, WriteError)

    run_ranks(2, work)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_disagree_on_a_value_are_named(tmp_path: Path, run_ranks: RunRanks, asynchronous: bool) -> None:
    """A common value is compared at every save, whether the plan is kept or not; both ranks are named."""

    def work(rank: int) -> None:
        saver = Saver(tmp_path, asynchronous=asynchronous)
        message = r"seed: expected the same on every rank that holds it, got 2 on rank 0 and 3 on rank 1"
        for step in (1, 2, 3):
            value = step + (rank if step == 2 else 0)
            tree = {"seed": Common(value), "x": torch.full((4,), float(step))}
            if step == 2 and not asynchronous:
                with pytest.raises(CheckpointError, match=message):
                    saver.save(step, tree, **ABOUT)
                continue
            saver.save(step, tree, **ABOUT)
            saver.wait()
            failure = saver.take_failure()
            assert (failure is not None) == (step == 2), failure
            if failure is not None:
                assert type(failure) is CheckpointError
                assert message in str(failure)
        saver.close()

    run_ranks(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000003"]
    assert read_manifest(tmp_path / "step_00000003").common == {"seed": 3}


@pytest.mark.parametrize("bad", [0, 1])
def test_what_fails_on_one_rank_before_the_background_ends_no_other(
    tmp_path: Path, run_ranks: RunRanks, bad: int
) -> None:
    """A value that is no JSON, or no memory for the copy, travels with the next collective to all."""

    def work(rank: int) -> list[str]:
        saver, messages = Saver(tmp_path, asynchronous=True), []
        for step in (1, 2, 3, 4):
            real = Staging.copy
            if step == 3 and rank == bad:
                setattr(Staging, "copy", lambda *_: 1 // 0)  # noqa: B010  # this is a forked process
            value = object() if step == 2 and rank == bad else step
            saver.save(step, {f"v{rank}": Owned(value, "m"), f"x{rank}": torch.ones(4)}, **ABOUT)
            saver.wait()
            setattr(Staging, "copy", real)  # noqa: B010
            messages.append(str(saver.take_failure()))
        saver.close()
        return messages

    for messages in run_ranks(2, work):
        assert messages[0] == messages[3] == "None"
        assert f"v{bad}: expected a JSON value" in messages[1]
        assert f"ZeroDivisionError: integer division or modulo by zero on rank {bad}" in messages[2]
    assert latest(tmp_path) == tmp_path / "step_00000004"


def test_background_collectives_meet_nobody_elses(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Training's collectives over the default group continue while ranks write at their own pace."""

    def work(rank: int) -> float:
        saver = Saver(tmp_path, asynchronous=True)
        total = torch.zeros(1)
        for step in range(1, 9):
            saver.save(step, {f"x{rank}": torch.full((1000,), float(step))}, **ABOUT)
            for _ in range(20):
                total = torch.ones(1)
                dist.all_reduce(total)
                found = torch.empty(dist.get_world_size(), 2, dtype=torch.int64)
                dist.all_gather_into_tensor(found, torch.tensor([[step, rank]]))
                assert found.tolist() == [[step, other] for other in range(dist.get_world_size())]
        saver.close()
        return total.item()

    assert run_ranks(3, work) == [3.0] * 3
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("step_")]) == 8


SIZES = [1 + (7 * index) % 40 for index in range(120)]


def test_the_work_is_shared_out_by_bytes(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Of tensors that four ranks hold each writes a quarter; what one alone holds counts."""

    def work(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        tree: dict[str, Any] = {
            f"x{index}": DTensor.from_local(torch.ones(256 * size), mesh, [Replicate()], run_check=False)
            for index, size in enumerate(SIZES)
        }
        saver = Saver(tmp_path)
        saver.save(1, tree, **ABOUT)
        saver.save(2, tree | ({"z": torch.ones(256 * sum(SIZES) // 8)} if rank == 2 else {}), **ABOUT)
        saver.close()

    run_ranks(4, work)
    for step, total in ((1, sum(SIZES)), (2, sum(SIZES) * 9 / 8)):
        manifest = read_manifest(tmp_path / f"step_0000000{step}")
        assert all(len(entry.pieces) == 1 for entry in manifest.tensors.values())
        written = [entry.bytes - entry.header_bytes for entry in manifest.shards.values()]
        assert sum(written) == 1024 * total
        assert len(written) == 4
        assert max(written) < 0.26 * sum(written)


def test_the_largest_piece_is_given_away_first() -> None:
    """PyTorch's planner goes by the names, and would give one rank of two four bytes of six."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({f"x{index}": torch.empty(size) for index, size in enumerate([1, 1, 1, 3])})
    shared = share_out([planner.create_local_plan()] * 2)
    assert [[item.index.fqn for item in plan.items] for plan in shared] == [["x3"], ["x0", "x1", "x2"]]
