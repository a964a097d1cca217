"""LoRA beside linears of ours, written beside those of a published model."""

from __future__ import annotations

import torch
from torch import Tensor

from mimo.model import HfTensor
from mimo.trainer.exporting.low_rank import Beside, beside_theirs


def learned(rank: int, inputs: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return what LoRA has learned beside a linear, ``down`` and ``up``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)


def only(found: list[Beside]) -> Beside:
    """Return the one that there is."""
    (one,) = found
    return one


def test_rows_of_one_linear_have_the_sum_of_their_ranks() -> None:
    """Each adds to its own rows what it adds here, and nothing to those that are not adapted, wherever these are."""
    rows = {"one": (0, 4), "two": (4, 5), "three": (5, 8), "four": (8, 10)}
    table = [HfTensor(ours=f"{name}.weight", theirs="all.weight", rows=rows[name]) for name in reversed(rows)]
    ours = {"two": learned(2, 6, 1, seed=0), "three": learned(2, 6, 3, seed=1)}
    found = only(list(beside_theirs(table, ours)))
    assert (found.name, sorted(found.paths)) == ("all", ["three", "two"])
    assert (found.down.shape, found.up.shape) == ((4, 6), (10, 4))
    wanted = torch.zeros(10, 6)
    wanted[4:5], wanted[5:8] = (up @ down for down, up in ours.values())
    torch.testing.assert_close(found.up @ found.down, wanted)


def test_a_linear_that_is_a_convolution_there_adds_to_its_kernel() -> None:
    """By a convolution that sees the same pixels, in their order, and one that sees a single place."""
    down, up = learned(2, 3 * 5 * 4, 7, seed=0)
    shape, dims = (7, 4, 3, 5), (0, 2, 3, 1)
    table = [HfTensor(ours="patch.weight", theirs="embed.weight", shape=shape, dims=dims)]
    found = only(list(beside_theirs(table, {"patch": (down, up)})))
    assert (found.down.shape, found.up.shape) == ((2, 4, 3, 5), (7, 2, 1, 1))
    kernel = torch.einsum("or,rchw->ochw", found.up[:, :, 0, 0], found.down)
    torch.testing.assert_close(kernel.permute(dims).reshape(7, -1), up @ down)  # as a folder is read


def test_what_can_stand_beside_nothing_is_left_out() -> None:
    """Experts, of which each is a matrix, one that is transposed there, and what has no name that ends so."""
    table = [
        HfTensor(ours="experts.up.weight", theirs=("experts.0.weight", "experts.1.weight")),
        HfTensor(ours="stack.weight", theirs="stack.weight"),
        HfTensor(ours="turned.weight", theirs="turned.weight", dims=(1, 0)),
        HfTensor(ours="fused.weight", theirs="in_proj_weight"),
    ]
    many = torch.zeros(2, 1, 3), torch.zeros(2, 4, 1)
    one = learned(1, 3, 4, seed=0)
    assert list(beside_theirs(table, {"experts.up": many, "stack": many, "turned": one, "fused": one})) == []
