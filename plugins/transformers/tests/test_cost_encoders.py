"""What `hf-encoder` and `hf-images` are said to take: by hand, and against what its linears and convolutions do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import Any

import attrs
import pytest
import torch
from library import saved_elements
from published_images import EACH, FOLDERS, SIZES, picture
from test_hf_encoder import small
from test_hf_images import WIDTH, config_of

from mimo.model import OpCost, ProjectorConfig, Stage
from mimo_transformers import HF_ENCODER, HF_IMAGES
from mimo_transformers.cost.tower import TowerCost

pytestmark = pytest.mark.newest
HIDDEN = 24


def _cost(spec: Any, config: Any, hidden: int, *sizes: tuple[int, int], recompute: str = "none") -> dict[str, OpCost]:
    return dict(spec.flops(config, hidden, Stage(), recompute, sizes))


def _images_cost(config: Any, *sizes: tuple[int, int], recompute: str = "none") -> dict[str, OpCost]:
    return _cost(HF_IMAGES, config, WIDTH, *sizes, recompute=recompute)


@pytest.mark.parametrize(
    ("model_type", "layers", "before", "settings"),
    [
        ("siglip_vision_model", 3, 0, {}),
        ("clip_vision_model", 2, 1, {"feature_layer": -2}),
    ],
)
def test_towers_of_one_size_take_what_is_counted_by_hand(
    model_type: str, layers: int, before: int, settings: dict[str, Any]
) -> None:
    """Patches, layers up to the one whose rows are handed on, and the projector; neither pooling nor later layers."""
    config = small(model_type, projector=ProjectorConfig(kind="linear"), **settings)
    library: Any = config.library()
    width, inner = library.hidden_size, library.intermediate_size
    patches = (library.image_size // library.patch_size) ** 2
    rows, pixels = patches + before, 3 * library.patch_size**2
    found = _cost(HF_ENCODER, config, HIDDEN, (40, 30), (12, 50))
    first = 2 * patches * pixels * width
    assert found["encoder"].weighted == 2 * (first + layers * 2 * rows * (4 * width**2 + 2 * width * inner))
    assert found["encoder"].of_items == 2 * first
    assert found["encoder"].inner == 2 * layers * 4 * rows**2 * width
    assert found["projector"].weighted == 2 * 2 * patches * width * HIDDEN
    assert _cost(HF_ENCODER, config, HIDDEN)["encoder"] == OpCost(weights=found["encoder"].weights)


@pytest.mark.parametrize("max_pixels", [64 * 64, 2048 * 2048])
def test_images_of_their_own_size_take_what_is_counted_by_hand(max_pixels: int) -> None:
    """Of Qwen2-VL: where few sizes are possible each is run, and else follows from a few of them."""
    config = config_of("qwen2_vl")
    config = attrs.evolve(config, images={**config.images, "min_pixels": 32 * 32, "max_pixels": max_pixels})
    tower: Any = config.library().vision_config
    width, hidden, patch = tower.embed_dim, WIDTH, tower.patch_size
    pixels = 3 * tower.temporal_patch_size * patch**2
    merged, sizes = tower.spatial_merge_size**2, ((300, 200), (40, 72))
    found = _images_cost(config, *sizes)
    rows = [height * width // patch**2 for _, height, width in map(config.processing.shape, sizes)]
    mlp = 2 * width * int(width * tower.mlp_ratio)
    by_row = 2 * (pixels * width + tower.depth * (4 * width**2 + mlp))
    assert found["encoder"].weighted == pytest.approx(sum(rows) * by_row, rel=1e-12)
    assert found["encoder"].of_items == pytest.approx(sum(rows) * 2 * pixels * width, rel=1e-12)
    assert found["encoder"].inner == pytest.approx(tower.depth * 4 * width * sum(n**2 for n in rows), rel=1e-12)
    last = 2 * merged * width * (merged * width + hidden)
    assert found["projector"].weighted == pytest.approx(sum(rows) / merged * last, rel=1e-12)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3", "internvl", "idefics3"])
def test_products_with_weights_are_those_of_linears_and_convolutions_that_run(name: str) -> None:
    """Windows, images of their own size, tiles and joined rows, of one image after the other."""
    config = config_of(name)
    sizes = ((40, 30), (90, 200))
    encoder: Any = HF_IMAGES.build(config, WIDTH)
    products: list[int] = []

    def count(part: Any, _given: Any, found: torch.Tensor) -> None:
        products.append(2 * found.numel() * part.weight.shape[1:].numel())

    for part in encoder.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and weight.dim() > 1 and not isinstance(part, torch.nn.Embedding):
            part.register_forward_hook(count)
    with torch.no_grad():
        for size in sizes:  # each alone, without what pads them to one size
            encoder([HF_IMAGES.prepare(config, picture(size))])
    found = _images_cost(config, *sizes)
    assert sum(one.weighted for one in found.values()) == pytest.approx(sum(products), rel=1e-12)
    assert sum(one.weights for one in found.values()) == sum(one.numel() for one in encoder.parameters())


def test_layers_that_are_computed_again_save_their_rows_alone() -> None:
    """And their forward counts once more, but not that of patches."""
    config = small("siglip_vision_model")
    usual, again = (_cost(HF_ENCODER, config, HIDDEN, (8, 8), recompute=one)["encoder"] for one in ("none", "full"))
    library: Any = config.library()
    rows, pixels = (library.image_size // library.patch_size) ** 2, 3 * library.patch_size**2
    outside = usual.of_items
    assert again.forward == usual.forward
    assert again.repeated == usual.forward - outside
    assert again.split == 0
    positions = 2 * rows  # whole numbers of 8 bytes
    assert again.copied == rows * library.hidden_size * 3 + rows * pixels + positions


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "glm4v", "idefics3", "internvl"])
def test_towers_save_what_autograd_saves_of_them(name: str) -> None:
    """Of one image after the other, by a forward that computes; kernels of attention save no scores."""
    config = config_of(name)
    encoder: Any = HF_IMAGES.build(config, WIDTH)
    sizes = ((40, 30), (90, 200))
    items = [HF_IMAGES.prepare(config, picture(size)) for size in sizes]
    total = sum(saved_elements(encoder, partial(encoder, [item])) for item in items)
    found = _images_cost(config, *sizes).values()
    assert sum(one.split + one.copied for one in found) == pytest.approx(total, rel=0.05)


def test_what_cannot_run_without_storage_is_counted_by_its_weights() -> None:
    """As what looks at rows to say how many there are."""
    encoder = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False, device="meta"))

    def run(_sizes: Sequence[tuple[int, int]]) -> float:
        return float(encoder(torch.ones(7, 3)).sum().item())

    cost = TowerCost(encoder, run=run, layers=[], shape=lambda _size: (1, 8, 8), rows=lambda _size: 7)
    assert cost.of([(8, 8), (4, 4)], "none") == {"0": OpCost(weighted=2 * 2 * 7 * 15, weights=15)}


class _Masked(torch.nn.Module):
    """A tower whose layers are given a mask over the rows of all images, and no angles."""

    def __init__(self, *, joint: bool) -> None:
        super().__init__()
        self.tower = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        for layer in self.tower:
            assert isinstance(layer, torch.nn.Linear)
            layer.forward = partial(self._layer, layer)  # type: ignore[method-assign]  # with a mask
        self._joint = joint

    def forward(self, counts: Sequence[int]) -> torch.Tensor:
        """Return rows of images of so many."""
        groups = [sum(counts)] if self._joint else counts
        found = []
        for count in groups:
            rows, mask = torch.ones(count, 4, device="meta"), torch.zeros(count, count, device="meta")
            for layer in self.tower:
                rows = layer(rows, mask=mask)
            found.append(rows)
        return torch.cat(found)

    @staticmethod
    def _layer(layer: torch.nn.Linear, rows: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return ((rows @ rows.T + mask).softmax(-1) @ rows) @ layer.weight


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("joint", [True, False])
def test_masks_over_all_images_grow_with_the_square_of_their_rows(joint: bool, recompute: str) -> None:
    """Held once for all layers, whether these are computed again or not; those of one image each are its own."""
    with torch.device("meta"):
        encoder = _Masked(joint=joint)
    cost = TowerCost(
        encoder,
        run=lambda sizes: encoder([min(height, 64) * min(width, 64) // 16 for height, width in sizes]),
        layers=list(encoder.tower),
        shape=lambda size: (1, min(size[0], 64), min(size[1], 64)),
        rows=lambda size: size[0] * size[1] // 16,
    )
    counts = (16, 64, 64)
    found = cost.of([(16, 16), (32, 32), (16, 64)], recompute)["tower"]
    assert found.paired == pytest.approx(sum(counts) if joint else 0)
    rows = 4 * sum(counts)
    masks = 0 if joint else sum(count**2 for count in counts)
    if recompute == "full":
        assert found.copied == pytest.approx(3 * rows + masks)
    assert found.paired**2 + masks == pytest.approx(sum(counts) ** 2 if joint else masks)


@EACH
def test_shapes_of_pictures_are_said_beforehand(name: str) -> None:
    """Of images of all sizes, without looking at any."""
    processing = FOLDERS[name].processing()
    for size in SIZES:
        count, _, *sides = processing.prepare(picture(size))["pixels"].shape
        assert processing.shape(size) == (count, *sides)


def test_threads_that_ask_at_once_get_the_same() -> None:
    """Loading asks beside the step: hooks of one run would count the other's layers."""
    with torch.device("meta"):
        encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    found: list[dict[str, OpCost]] = []
    others: list[Thread] = []

    def run(_sizes: Sequence[tuple[int, int]]) -> None:
        for layer in encoder:
            layer(torch.ones(3, 4, device="meta"))
            if cost and not others:  # the other asks while this one runs
                others.append(Thread(target=ask))
                others[0].start()
                others[0].join(0.1)

    def ask() -> None:
        found.append(dict(cost[0].of([(8, 8)], "full")))

    cost: list[TowerCost] = []
    cost.append(TowerCost(encoder, run=run, layers=list(encoder), shape=lambda size: (1, *size), rows=lambda _size: 3))
    cost[0]._known.clear()
    cost[0]._points = ()
    ask()
    others[0].join()
    assert found[0] == found[1] == dict(cost[0].of([(8, 8)], "full"))
    assert found[0]["0"].weighted == 2 * 3 * 4 * 4
