"""Collectives under one name in every release of torch, and plain data between ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.topology import collectives

OLD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def _gather_and_scatter(rank: int, *, is_older: bool) -> tuple[list[float], list[float], list[str]]:
    """Return what both give for stacked shapes, and the names in torch that they called."""
    called: list[str] = []
    for new, old in OLD_NAMES.items():
        function, name = getattr(dist, new if hasattr(dist, new) else old), old if is_older else new
        for each in filter(partial(hasattr, dist), (new, old)):  # the process ends after this one run
            delattr(dist, each)
        setattr(dist, name, _noting(function, name, called))
    x = torch.tensor([[1.0, 2.0]]) * 10**rank
    gathered, scattered = x.new_empty(2, 1, 2), x.new_empty(1)
    collectives.all_gather_single(gathered, x)
    work = collectives.reduce_scatter_single(scattered, x.view(2, 1), async_op=True)
    assert work is not None
    work.wait()
    return gathered.flatten().tolist(), scattered.tolist(), called


def _noting(function: Callable[..., Any], name: str, called: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **keys: Any) -> Any:
        called.append(name)
        return function(*args, **keys)

    return call


@pytest.mark.parametrize("is_older", [False, True])
def test_topology_collectives_take_any_shape_in_every_release(
    run_ranks: Callable[..., list[Any]], is_older: bool
) -> None:
    """Shapes that are stacked rather than joined work too, by the names that torch has, new or old."""
    names = [*(OLD_NAMES.values() if is_older else OLD_NAMES)]
    found = run_ranks(2, lambda rank: _gather_and_scatter(rank, is_older=is_older))
    assert found == [([1.0, 2.0, 10.0, 20.0], [11.0], names), ([1.0, 2.0, 10.0, 20.0], [22.0], names)]


def test_topology_plain_data_goes_to_all_ranks_of_a_group(run_ranks: Callable[..., list[Any]]) -> None:
    """Values of any length arrive as they were, by rank; one rank's goes to all."""
    said = [{"text": "é" * 10**rank, "numbers": [rank, 0.5, None]} for rank in range(3)]
    found = run_ranks(3, _said_by_all)
    assert [one[0] for one in found] == [said] * 3
    assert [one[1] for one in found] == [None, said[1:], said[1:]]
    assert [one[2] for one in found] == [said[0]] * 3


def _said_by_all(rank: int) -> tuple[Any, Any, Any]:
    pair = dist.new_group([1, 2])
    value = {"text": "é" * 10**rank, "numbers": [rank, 0.5, None]}
    own = collectives.all_gather_json(value, pair) if rank else None
    return collectives.all_gather_json(value), own, collectives.broadcast_json(value)


def _refusals(rank: int) -> list[str]:
    """Return what is raised where rank 1 says too much, and where its bytes are no JSON."""
    found = []
    with pytest.raises(ValueError, match=r"expected at most") as long:
        collectives.all_gather_json("x" * (100 if rank else 10), max_bytes=150)
    found.append(str(long.value))
    with pytest.raises(ValueError, match=r"expected at most") as broadcast:
        collectives.broadcast_json("x" * 100, max_bytes=50)
    found.append(str(broadcast.value))
    if rank:
        text = torch.full((100_000,), ord("["), dtype=torch.uint8)
        vars(collectives)["_to_bytes"] = lambda _value, _device: text  # the process ends after this one run
    with pytest.raises(ValueError, match="has sent no JSON") as garbled:
        collectives.all_gather_json([])
    found.append(str(garbled.value).partition(":")[0])
    return found


def test_topology_wrong_data_is_refused_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """What is too long is refused before room is made for it, what is no JSON when it is read, on every rank."""
    texts = [
        "expected at most 150 bytes of JSON from all ranks, got 102 bytes of rank 1 for each of 2 ranks",
        "expected at most 50 bytes of JSON from all ranks, got 102 bytes of rank 0",
        "rank 1 has sent no JSON",
    ]
    assert run_ranks(2, _refusals) == [texts, texts]


def _says_no_json(rank: int) -> list[tuple[str, str]]:
    """Return what is raised, and its cause, where one rank's value is no JSON."""
    found = []
    for value in (torch.ones(1), float("nan")):
        with pytest.raises(ValueError, match="plain JSON data") as gathered:
            collectives.all_gather_json(value if rank else [])
        with pytest.raises(ValueError, match="plain JSON data") as refused:
            collectives.broadcast_json([] if rank else value)
        found += [(str(each.value), type(each.value.__cause__).__name__) for each in (gathered, refused)]
    assert collectives.all_gather_json(rank) == [0, 1], "they go on together"
    return found


def test_topology_what_is_no_json_is_refused_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """Nobody waits for the rank that can't say it; that rank also names what is wrong with it."""
    texts = [f"expected plain JSON data from every rank, got something else from rank {rank}" for rank in (1, 0)]
    for rank, found in enumerate(run_ranks(2, _says_no_json)):
        causes = [(kind if one == rank else "NoneType") for kind in ("TypeError", "ValueError") for one in (1, 0)]
        assert found == [*zip(texts * 2, causes, strict=True)]


def _where(_rank: int) -> tuple[str, str, str]:
    return str(collectives.device_of()), collectives.backend_for("cpu"), collectives.backend_for("cuda")


def test_topology_backends_follow_from_the_default_group(run_ranks: Callable[..., list[Any]]) -> None:
    """Gloo carries tensors of the host, and would those of devices; both are connected at once, NCCL late."""
    assert run_ranks(1, _where) == [("cpu", "gloo", "gloo")]
    assert [collectives.connects_late(name) for name in ("gloo", "fake", "nccl", "xccl")] == [False, False, True, True]
