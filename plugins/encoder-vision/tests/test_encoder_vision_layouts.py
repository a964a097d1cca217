"""The encoder against one written out here, and over tensor ranks and stages against itself (design law 1)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from torch import Tensor

from mimo.model import EncoderSpec, ProjectorConfig
from mimo.model.runtime import gradient_of, local
from mimo.model.testing import ModuleLayout, Subject, assert_layouts
from mimo_encoder_vision import CLIP, SIGLIP, VIT, ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._grids import grids_of

HIDDEN = 10
SMALL = VitConfig(patch=2, channels=3, width=24, layers=3, heads=6, intermediate=11)
SIZES = ((4, 4), (2, 6), (4, 4), (8, 2), (2, 2))
_SHARED: dict[str, Any] = {"patch": 2, "width": 12, "layers": 3, "heads": 6, "intermediate": 11}
_RESAMPLER = ProjectorConfig(kind="resampler", hidden=12, heads=6, queries=3, layers=1, norm="layer")
FAMILIES: dict[str, tuple[EncoderSpec, VisionConfig]] = {
    "vit": (VIT, SMALL),
    "native, joined, resized positions": (
        SIGLIP,
        SiglipConfig(
            **_SHARED, mode="native", table=3, resize_positions="bilinear", projector=ProjectorConfig(shuffle=2)
        ),
    ),
    "native, enlarged, resampled": (
        SIGLIP,
        SiglipConfig(**_SHARED, mode="native", size=6, max_patches=9, enlarge=True, projector=_RESAMPLER),
    ),
    "tiles, joined": (
        CLIP,
        ClipConfig(**_SHARED, mode="tiles", size=4, max_tiles=3, projector=ProjectorConfig(kind="linear", shuffle=2)),
    ),
    "class token kept, a layer left": (
        CLIP,
        ClipConfig(**_SHARED, size=6, keep_class_token=True, feature_layer=-2, final_norm=False),
    ),
    "tiles, class token seen, resampled": (
        CLIP,
        ClipConfig(**_SHARED, mode="tiles", size=4, max_tiles=4, keep_class_token=True, projector=_RESAMPLER),
    ),
}


def _items(config: VisionConfig, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    items = []
    for size in sizes:
        grids, side = grids_of(config, size), config.patch
        shape = (len(grids), config.channels, grids[0][0] * side, grids[0][1] * side)
        items.append({"pixels": torch.randn(shape, generator=generator)})
    return items


def _images(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    values = random.Random(4)
    return [
        Image.frombytes("RGB", size[::-1], bytes(values.randrange(256) for _ in range(3 * size[0] * size[1])))
        for size in sizes
    ]


def _subject(config: VitConfig = SMALL) -> Subject:
    return Subject(spec=VIT, config=config, hidden=HIDDEN, raw=_images(SIZES))


def _reference(config: VitConfig, weights: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """One image's rows, patch by patch and head by head."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, x: Tensor) -> Tensor:
        standard = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return standard * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def mlp(name: str, x: Tensor) -> Tensor:
        middle = linear(f"{name}.up", x)
        return linear(f"{name}.down", middle * 0.5 * (1 + torch.erf(middle / math.sqrt(2))))

    side, quarter = config.patch, config.width // 4
    rows = []
    for down in range(pixels.shape[1] // side):
        for across in range(pixels.shape[2] // side):
            patch = pixels[:, down * side : (down + 1) * side, across * side : (across + 1) * side]
            position = [
                wave(place / 10000 ** (i / quarter))
                for place in (down, across)
                for wave in (math.sin, math.cos)
                for i in range(quarter)
            ]
            rows.append(linear("patch", patch.permute(1, 2, 0).reshape(-1)) + torch.tensor(position))
    x = torch.stack(rows)
    width = config.width // config.heads
    for layer in range(config.layers):
        path = f"layers.{layer}"
        y = norm(f"{path}.attention_norm", x)
        query, key, value = (linear(f"{path}.attention.{name}", y) for name in ("query", "key", "value"))
        heads = []
        for head in range(config.heads):
            mine = slice(head * width, (head + 1) * width)
            heads.append((query[:, mine] @ key[:, mine].T / math.sqrt(width)).softmax(-1) @ value[:, mine])
        x = x + linear(f"{path}.attention.output", torch.cat(heads, -1))
        x = x + mlp(f"{path}.mlp", norm(f"{path}.mlp_norm", x))
    return mlp("projector.mlp", norm("norm", x))


def _check_reference(_rank: int) -> None:
    for config in (SMALL, attrs.evolve(SMALL, channels=1, projector=ProjectorConfig(hidden=7), heads=2)):
        built = _subject(config).build(stirred=False)
        with torch.no_grad():  # biases start at zero and norms at one, where a mistake would not show
            for index, parameter in enumerate(built.parameters.values()):
                piece = local(parameter)
                piece.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(index)) * 0.3 + 0.1)
        weights = {
            name: local(parameter.detach()).clone().requires_grad_() for name, parameter in built.parameters.items()
        }
        items = _items(config, SIZES)
        found = built.encode(items, SIZES)
        wanted = torch.cat([_reference(config, weights, item["pixels"][0]) for item in items])
        assert len(found) == sum(VIT.rows(config, size) for size in SIZES)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        found.backward(gradient)
        wanted.backward(gradient)
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        assert gradients.keys() == weights.keys()
        whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, wanted_gradient in gradients.items():
            ours = gradient_of(built.parameters[name])
            assert ours is not None
            difference = (ours - wanted_gradient).norm()
            assert difference <= 1e-5 * max(wanted_gradient.norm(), 1e-3 * whole), name


def test_equals_an_encoder_written_out(run_ranks: Callable[..., list[Any]]) -> None:
    """Rows and every gradient are those of the formulas image by image."""
    run_ranks(1, _check_reference)


EVERYTHING = (SIZES, ((2, 6),), ((2, 6), (2, 2)), (), ((12, 14), (4, 4)))


def _check_layouts(family: str, pp: int, cp: int, tp: int, everything: Sequence[Sequence[tuple[int, int]]]) -> None:
    spec, config = FAMILIES[family]
    places = [ModuleLayout(pp=pp, cp=cp, tp=tp, sequence_parallel=splits) for splits in (False, True)[: min(tp, 2)]]
    assert_layouts(spec, [_images(sizes) for sizes in everything], places, config=config, hidden=HIDDEN)


@pytest.mark.parametrize(
    ("pp", "cp", "tp"),
    [
        *((3, 1, 1), (2, 1, 2), (1, 1, 3)),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, 1, 1), (1, 1, 6))),
    ],
)
def test_layout_changes_nothing(pp: int, cp: int, tp: int) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    Over tensor ranks and stages, with rows whole and split (sequence parallelism); with images cut anywhere, with ranks
    without a row, and without an image at all.
    """
    _check_layouts("vit", pp, cp, tp, EVERYTHING)


@pytest.mark.parametrize(
    ("pp", "cp", "tp"),
    [
        (2, 2, 2),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, 3, 1), (1, 2, 1), (1, 4, 1), (1, 2, 3))),
    ],
)
def test_context_ranks_change_nothing(pp: int, cp: int, tp: int) -> None:
    """The same over context ranks, and tensor ranks inside of them."""
    _check_layouts("vit", pp, cp, tp, EVERYTHING)


FIVE = ((5, 9), (3, 4), (12, 5), (4, 4), (1, 1))


@pytest.mark.parametrize(
    ("family", "pp", "cp", "tp"),
    [
        pytest.param(name, *layout, marks=() if number % 2 == place else pytest.mark.soak)
        for number, name in enumerate(name for name in FAMILIES if name != "vit")
        for place, layout in enumerate([(2, 1, 2), (1, 3, 1)])
    ],
)
def test_layout_changes_no_family(family: str, pp: int, cp: int, tp: int) -> None:
    """The same for class tokens, joined patches, tiles, resampled and native images: five of them, and none."""
    _check_layouts(family, pp, cp, tp, (FIVE, ()))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("pp", "cp", "tp"), [(2, 2, 2), (1, 1, 3), (3, 2, 1), (1, 1, 6), (2, 1, 3), (1, 4, 1), (1, 3, 2)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_more_layouts_change_no_family(family: str, pp: int, cp: int, tp: int) -> None:
    """One to four images too."""
    _check_layouts(family, pp, cp, tp, (FIVE, FIVE[1:2], FIVE[:2], FIVE[2:], FIVE[:4], ((40, 3), (1, 1)), ()))


_SEAMS = {"vit": (2, 1, 2), "native, joined, resized positions": (1, 2, 1), "class token kept, a layer left": (1, 1, 1)}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if _SEAMS.get(family) == layout else pytest.mark.soak)
        for family in FAMILIES
        for layout in ((1, 1, 1), (1, 2, 1), (2, 1, 2))
    ],
)
def test_a_seam_changes_no_bit(family: str, layout: tuple[int, int, int]) -> None:
    """Tower and projector as two stages give the rows and gradients of the last stage that holds both."""
    spec, config = FAMILIES[family]
    pp, cp, tp = layout
    usual = ModuleLayout(pp=pp, cp=cp, tp=tp, sequence_parallel=tp > 1)
    places = [attrs.evolve(usual, seam=True)]
    assert_layouts(spec, [_images(FIVE), []], places, like=usual, config=config, hidden=HIDDEN)


def _check_frozen(_rank: int) -> None:
    subject = _subject()
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder"})))
    built.encode(subject.items(), SIZES).sum().backward()
    for name, parameter in built.parameters.items():
        assert (gradient_of(parameter) is not None) == name.startswith("projector."), name
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder", "projector"})))
    assert not built.encode(subject.items(), SIZES).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_alone(_rank: int) -> None:
    built, items = _subject().build(stirred=False), _items(SMALL, SIZES)
    together = built.encode(items, SIZES)
    one_by_one = torch.cat([built.encode([item], [size]) for item, size in zip(items, SIZES, strict=True)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    turned = items[0]["pixels"].flip(3)
    assert not torch.allclose(built.encode([{"pixels": turned}], SIZES[:1]), together[:4])


def test_images_do_not_see_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """An image's rows are the same alone and among others, and depend on where in it things are."""
    run_ranks(1, _check_alone)
