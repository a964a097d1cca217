"""The encoder over tensor, context and pipeline ranks against itself on one (design law 1), and recomputed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from PIL import Image

from mimo.model import ProjectorConfig
from mimo.model.runtime import gradient_of
from mimo.model.testing import ModuleLayout, Subject, assert_layouts
from mimo.topology import Recompute
from mimo_encoder_radio import RADIO, RadioConfig

HIDDEN = 10
Sizes = Sequence[tuple[int, int]]
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")


def _config(projector: ProjectorConfig | None = None, **changes: Any) -> RadioConfig:
    values = {"patch": 2, "width": 24, "layers": 3, "heads": 6, "intermediate": 12, "positions": 3, "registers": 2}
    return RadioConfig(**{**values, "projector": projector or ProjectorConfig(), **changes})


CONFIGS = {
    "shuffled": _config(ProjectorConfig(hidden=12, shuffle=2, norm="rms", activation="squared_relu", bias=False)),
    "dropped": _config(),
    "kept": _config(ProjectorConfig(norm="layer"), keep=(0, 3)),
    "tiles": _config(ProjectorConfig(kind="linear", shuffle=2), mode="tiles", size=4, max_tiles=3),
    "queries": _config(ProjectorConfig(kind="resampler", hidden=12, queries=3, heads=6), keep=(1,)),
}
EVERYTHING: tuple[Sizes, ...] = (((4, 4), (2, 6), (4, 4), (8, 3), (1, 1)), ((2, 2),), (), ((12, 14), (4, 20)))
"""No image, few rows for many ranks, images of one size and of others, larger and smaller than the positions."""


def _image(size: tuple[int, int]) -> Image.Image:
    values = random.Random(str(size))
    return Image.frombytes("RGB", size[::-1], bytes(values.randrange(256) for _ in range(3 * size[0] * size[1])))


def _batches(everything: Sequence[Sizes] = EVERYTHING) -> list[list[Image.Image]]:
    return [[_image(size) for size in sizes] for sizes in everything]


def _subject(name: str) -> Subject:
    return Subject(spec=RADIO, config=CONFIGS[name], hidden=HIDDEN, raw=_batches()[0])


LAYOUTS = {(2, 2, 2): "shuffled", (3, 1, 1): "dropped", (2, 3, 1): "kept", (2, 1, 2): "tiles", (1, 1, 3): "queries"}
"""Of stages, context ranks and tensor ranks, with the settings that are always run on them."""
CASES = [
    pytest.param(*layout, name, marks=() if LAYOUTS[layout] == name else pytest.mark.soak)
    for layout in LAYOUTS
    for name in CONFIGS
]


@pytest.mark.parametrize(("pp", "cp", "tp", "name"), CASES)
def test_layout_changes_nothing(pp: int, cp: int, tp: int, name: str) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    With rows whole and split (sequence parallelism), images cut anywhere, ranks without a row, and no image at all;
    class tokens dropped and kept, patches joined, tiles, and learned queries.
    """
    places = [ModuleLayout(pp=pp, cp=cp, tp=tp, sequence_parallel=splits) for splits in (False, True)[: min(tp, 2)]]
    assert_layouts(RADIO, _batches(), places, config=CONFIGS[name], hidden=HIDDEN)


@pytest.mark.parametrize(("cp", "tp", "sequence_parallel"), [(1, 1, False), (1, 2, True), (2, 1, False)])
def test_recomputing_and_splitting_change_no_bit(cp: int, tp: int, sequence_parallel: bool) -> None:
    """On all ranks, those without rows too, one microbatch has the gradients that it has without either."""
    usual = ModuleLayout(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    places = [attrs.evolve(usual, recompute=way, splits_backward=splits) for way in WAYS for splits in (False, True)]
    assert_layouts(RADIO, _batches(EVERYTHING[::2]), places, like=usual, config=CONFIGS["shuffled"], hidden=HIDDEN)


@pytest.mark.parametrize(
    ("name", "cp", "tp"),
    [
        pytest.param(
            name, cp, tp, marks=() if (name, cp, tp) in {("kept", 2, 1), ("queries", 1, 2)} else pytest.mark.soak
        )
        for name in CONFIGS
        for cp, tp in ((2, 1), (1, 2))
    ],
)
def test_a_seam_changes_no_bit(name: str, cp: int, tp: int) -> None:
    """Tower and projector as two stages give the rows and gradients of the one that holds both."""
    usual = ModuleLayout(cp=cp, tp=tp, sequence_parallel=tp > 1)
    places = [attrs.evolve(usual, seam=True)]
    assert_layouts(RADIO, _batches(EVERYTHING[::2]), places, like=usual, config=CONFIGS[name], hidden=HIDDEN)


def _check_frozen(_rank: int) -> None:
    subject = _subject("shuffled")
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder"})))
    built.encode(subject.items(), subject.sizes()).sum().backward()
    for name, parameter in built.parameters.items():
        assert (gradient_of(parameter) is not None) == name.startswith("projector."), name
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder", "projector"})))
    assert not built.encode(subject.items(), subject.sizes()).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_others(_rank: int) -> None:
    subject = _subject("kept")
    built, items, sizes = subject.build(stirred=False), subject.items(), subject.sizes()
    together = built.encode(items, sizes)
    one_by_one = torch.cat([built.encode([item], [size]) for item, size in zip(items, sizes, strict=True)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    turned = items[0]["pixels"].flip(3)
    assert not torch.allclose(built.encode([{"pixels": turned}], sizes[:1])[:2], together[:2])
    for dtype in (torch.bfloat16, torch.float16):
        rows = subject.build(ModuleLayout(dtype=dtype), stirred=False).encode(items, sizes)
        assert rows.dtype == dtype
        assert float((rows.float() - together).norm()) < 2e-2 * float(together.norm())


def test_images_do_not_see_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """An image's rows are the same alone and among others; class tokens see it; half precision comes near."""
    run_ranks(1, _check_others)
