"""A dry run of a large topology in one process, over torch's backend that talks to nobody."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # it registers the backend

from mimo.topology import DATA_AXES, Grid, Module, ModuleGraph, needed_groups
from mimo.topology.meshes import Meshes

WORLD = 1024


@attrs.frozen(kw_only=True)
class Seen:
    """What one rank has after all groups and meshes are made."""

    tensor: dict[str, list[int]]
    data: dict[str, list[int]]
    experts: list[list[int]]
    names: dict[tuple[int, ...], str]
    made: list[tuple[int, ...]]
    stored: int


def four_modules() -> ModuleGraph:
    """Return three encoders, two of them overlapping, and a language model with experts and tied embeddings."""
    grids = (
        Grid(name="vision", ranks=range(256), dp=32, cp=2, tp=4),
        Grid(name="audio", ranks=range(128, 512, 3), dp=64, tp=2),
        Grid(name="radio", ranks=range(512, WORLD), pp=2, dp=256),
        Grid(name="language", ranks=range(WORLD), pp=4, dp=8, cp=4, tp=8, ep=16, etp=2),
    )
    return ModuleGraph(
        modules=tuple(
            Module(grid=grid, trains=(True,) * grid.pp, tied=grid.name == "language", experts=grid.name == "language")
            for grid in grids
        ),
        arrows=tuple((grid.name, "language") for grid in grids[:-1]),
    )


def _look(rank: int) -> Seen:
    """Return what ``rank`` of the dry run has."""
    store = HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=WORLD)
    made, before = _count_groups(), store.num_keys()
    graph = four_modules()
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    language = graph.by_name["language"].grid
    mesh = meshes.expert_mesh(language)
    assert mesh.mesh_dim_names == ("ep", "etp")
    grids = {name: graph.by_name[name].grid for name in graph.role(rank).places}
    mine = [ranks for ranks in needed_groups(graph) if rank in ranks]
    return Seen(
        tensor={name: meshes.tensor_mesh(grid).mesh.tolist() for name, grid in grids.items()},
        data={name: dist.get_process_group_ranks(meshes.axes_group(grid, DATA_AXES)) for name, grid in grids.items()},
        experts=mesh.mesh.tolist(),
        names={ranks: meshes.group(ranks).group_name for ranks in mine},
        made=made,
        stored=store.num_keys() - before,
    )


def _count_groups() -> list[tuple[int, ...]]:
    """Have torch list the ranks of each group that this process takes part in making, as a member or not."""
    make, made = distributed_c10d._new_process_group_helper, list[tuple[int, ...]]()

    def count(size: int, place: int, ranks: list[int], *args: Any, **keys: Any) -> Any:
        made.append(tuple(ranks))
        return make(size, place, ranks, *args, **keys)

    vars(distributed_c10d)["_new_process_group_helper"] = count
    return made


def _send(rank: int, sender: Connection) -> None:
    try:
        sender.send(_look(rank))
    except BaseException:  # noqa: BLE001 -- whatever it is, the test shows it
        sender.send(traceback.format_exc())


def look(rank: int) -> Seen:
    """Run the dry run in a forked process, whose groups end with it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(rank, sender))
    child.start()
    found = receiver.recv()
    child.join()
    assert isinstance(found, Seen), found
    return found


def test_topology_a_rank_in_three_modules_builds_its_meshes() -> None:
    """Rank 131 is in two encoders and in stage 0 of the language model, whose last stage ties it to rank 899."""
    seen = look(131)
    assert seen.tensor == {"vision": [128, 129, 130, 131], "audio": [128, 131], "language": [*range(128, 136)]}
    assert seen.data["audio"] == [*range(131, 512, 6)]
    assert seen.data["language"] == [*range(3, 256, 8)]
    assert seen.experts == [[128 + 2 * share, 129 + 2 * share] for share in range(16)]
    assert (131, 899) in seen.names


@pytest.mark.parametrize(("rank", "module", "first"), [(0, "vision", 0), (512, "radio", 512), (1023, "radio", 992)])
def test_topology_ranks_of_every_kind_build_theirs(rank: int, module: str, first: int) -> None:
    """At both ends of the world, and in one encoder alone."""
    seen = look(rank)
    assert seen.tensor.keys() == {module, "language"}
    assert seen.experts[0] == [first, first + 1]


def test_topology_a_rank_makes_the_groups_that_it_is_in_and_no_others() -> None:
    """Fifteen at most, of more than a thousand; in the store they take one key, which numbers what is made."""
    total = needed_groups(four_modules())
    assert len(total) > 1000
    for rank, count in ((131, 15), (600, 8)):
        seen = look(rank)
        own = [ranks for ranks in total if rank in ranks]
        assert seen.made == [*own, (rank,)]
        assert (len(own), seen.stored) == (count, 1)


def test_topology_ranks_call_a_group_by_one_name() -> None:
    """Names follow from ranks: groups that two ranks share have the same one, others their own."""
    one, other = look(128), look(131)
    shared = one.names.keys() & other.names.keys()
    assert {(128, 131), tuple(range(128, 132)), tuple(range(128, 136))} < shared
    assert all(one.names[ranks] == other.names[ranks] for ranks in shared)
    everything = one.names | other.names
    assert len(set(everything.values())) == len(everything)
