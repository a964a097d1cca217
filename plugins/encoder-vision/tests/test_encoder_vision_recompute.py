"""The encoder where backward is split, or computes part of the forward again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from torch import Tensor

from mimo.model.runtime import local
from mimo.model.testing import Built, ModuleLayout, Subject, assert_layouts
from mimo.topology import Recompute
from mimo_encoder_vision import VIT, VitConfig

HIDDEN = 10
CONFIG = VitConfig(patch=2, channels=3, width=24, layers=3, heads=6, intermediate=40)
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
EVERYTHING = (((4, 4), (2, 6), (8, 2)), ((2, 2),), ())


def _images(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    values = random.Random(4)
    return [
        Image.frombytes("RGB", size[::-1], bytes(values.randrange(256) for _ in range(3 * size[0] * size[1])))
        for size in sizes
    ]


def _subject(sizes: Sequence[tuple[int, int]]) -> Subject:
    return Subject(spec=VIT, config=CONFIG, hidden=HIDDEN, raw=_images(sizes))


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"),
    [
        *((1, 1, False), (2, 2, True)),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in ((1, 2, False), (1, 2, True), (2, 1, False))),
    ],
)
def test_recomputing_and_splitting_change_no_bit(cp: int, tp: int, sequence_parallel: bool) -> None:
    """On all ranks, those without rows too, one microbatch has the gradients that it has without either."""
    usual = ModuleLayout(pp=2, cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    places = [attrs.evolve(usual, recompute=way, splits_backward=splits) for way in WAYS for splits in (False, True)]
    assert_layouts(VIT, [_images(sizes) for sizes in EVERYTHING], places, like=usual, config=CONFIG, hidden=HIDDEN)


def _kept(built: Built, subject: Subject) -> int:
    """Return the bytes that a forward keeps for its backward, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in built.parameters.values()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rows = built.encode(subject.items(), subject.sizes())
    assert rows.requires_grad
    return sum(kept.values())


def _check_kept(_rank: int) -> None:
    subject = _subject(((16, 16), (8, 8)))
    kept = {way: _kept(subject.build(ModuleLayout(recompute=way)), subject) for way in WAYS}
    rows, layers = 64 + 16, CONFIG.layers
    between = 4 * rows * layers * (CONFIG.width + CONFIG.intermediate)  # what attention found, what GELU made
    assert kept["none"] - kept["selective"] >= between
    assert kept["full"] < kept["selective"] / 2


def test_less_is_kept(run_ranks: Callable[..., list[Any]]) -> None:
    """What lies between the products is not kept where it is recomputed, and only its rows of a whole layer."""
    run_ranks(1, _check_kept)


def test_evaluation_computes_nothing_again(run_ranks: Callable[..., list[Any]]) -> None:
    """Without gradient rows come out as ever, and no graph with them."""
    run_ranks(1, _check_evaluation)


def _check_evaluation(_rank: int) -> None:
    subject = _subject(EVERYTHING[0])
    ways: tuple[Recompute, ...] = ("none", "full")
    with torch.no_grad():
        usual, again = (
            subject.build(ModuleLayout(pp=2, recompute=way, splits_backward=True)).encode(
                subject.items(), subject.sizes()
            )
            for way in ways
        )
    assert torch.equal(usual, again)
    assert not again.requires_grad
