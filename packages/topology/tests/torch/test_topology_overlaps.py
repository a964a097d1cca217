"""Groups of drawn layouts, which overlap in all ways, made by their members alone on real processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.topology import Grid, Module, ModuleGraph, needed_groups
from mimo.topology.member_groups import GroupMaker
from mimo.topology.meshes import Meshes

WORLD = 6
TOGETHER = 5
"""Layouts whose groups are made one after the other in one world."""


def draw_layout(seed: int) -> ModuleGraph:
    """Draw two to four modules, each over any ranks along any axes, some with experts, or with copies on few lanes."""
    choice = random.Random(f"overlaps {seed}")

    def module(name: str) -> Module:
        ranks = sorted(choice.sample(range(WORLD), choice.choice([1, 2, 3, 4, 4, 6, 6])))
        sizes, left = dict.fromkeys(("pp", "dp", "cp", "tp"), 1), len(ranks)
        for factor in (2, 2, 3):
            if left % factor == 0:
                sizes[choice.choice(list(sizes))] *= factor
                left //= factor
        experts = choice.random() < 0.3
        lanes = sizes["dp"] * sizes["cp"]
        return Module(
            grid=Grid(name=name, ranks=ranks, ep=lanes if experts else 1, **sizes),
            trains=(True,) * sizes["pp"],
            tied=choice.random() < 0.5,
            experts=experts,
            shard_lanes=choice.choice([0, 1]),
            overlaps=choice.choice([frozenset[Any](), frozenset(["sums"]), frozenset(["sums", "gathers"])]),
        )

    return ModuleGraph(modules=tuple(module(name) for name in "abcd"[: choice.randint(2, 4)]), arrows=())


def _sums(rank: int, first: int) -> list[int]:
    """Make the groups of some layouts, sum 2**rank over each of this rank's, and return how many there are."""
    counts = []
    for seed in range(first, first + TOGETHER):
        graph = draw_layout(seed)
        meshes = Meshes(graph, rank=rank, device_type="cpu")
        own = [ranks for ranks in needed_groups(graph) if rank in ranks]
        for ranks in own:
            value = torch.tensor(2**rank)
            dist.all_reduce(value, group=meshes.group(ranks))
            assert int(value) == sum(2**member for member in ranks), (seed, ranks)
        counts.append(len(own))
    return counts


def _check(first: int, run_ranks: Callable[..., list[Any]]) -> None:
    counts = run_ranks(WORLD, _sums, first)
    for place in range(TOGETHER):
        groups = needed_groups(draw_layout(first + place))
        assert [made[place] for made in counts] == [sum(rank in group for group in groups) for rank in range(WORLD)]


def test_topology_members_of_overlapping_groups_make_them_alone(run_ranks: Callable[..., list[Any]]) -> None:
    """Each rank makes its own, and nobody waits for a rank that has other ones to make; some layouts in one world."""
    _check(0, run_ranks)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 50, TOGETHER))
def test_topology_members_of_more_overlapping_groups_make_them_alone(
    first: int, run_ranks: Callable[..., list[Any]]
) -> None:
    """Fifty layouts."""
    _check(first, run_ranks)


def _names(rank: int) -> tuple[list[str], str]:
    """Return the names of a group's makings, and what is said of it."""
    makers = [GroupMaker(backend="gloo") for _ in range(2)]
    if not rank:
        return [], ""
    made = [maker.make((1, 2), purpose=purpose) for maker in makers for purpose in ("rows", "gradients")]
    return [group.group_name for group in made], made[0].group_desc


def test_topology_groups_of_one_purpose_and_ranks_have_one_name_on_all_members(
    run_ranks: Callable[..., list[Any]],
) -> None:
    """Another purpose, or another maker, has another; and a description says in words what it is for."""
    others, (names, text), again = run_ranks(3, _names)
    assert (others, again) == (([], ""), (names, text))
    assert len(set(names)) == len(names)
    assert text == "rows, ranks 1-2"


class _Bound:
    """A default group as `init_process_group` with a ``device_id`` leaves it."""

    bound_device_id = torch.device("cuda:3")


def test_topology_a_default_group_on_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would split all further groups from it, for which it needs all ranks of the world."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", _Bound)
    text = (
        r"^expected a default process group that is bound to no device, got one with device_id cuda:3, .* "
        r"Leave device_id out of init_process_group, and call torch.cuda.set_device instead\.$"
    )
    with pytest.raises(ValueError, match=text):
        GroupMaker(backend="nccl")
