"""The plugin as mimo meets it: settings, sizes and preparation, and how it registers."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo_encoder_vision import VIT, VitConfig
from mimo_encoder_vision._plugin import grid_of, mimo_register_encoders

SMALL = VitConfig(patch=4, channels=1, width=16, layers=2, heads=2, intermediate=20)


@pytest.mark.parametrize(
    ("size", "patch", "grid"),
    [
        ((8, 8), 4, (2, 2)),
        ((8, 8), 2, (4, 4)),
        ((9, 10), 4, (2, 3)),
        ((1, 1), 16, (1, 1)),
        ((15, 33), 16, (1, 2)),
    ],
)
def test_images_become_the_nearest_whole_patches(size: tuple[int, int], patch: int, grid: tuple[int, int]) -> None:
    """Each side is rounded to whole patches, at least one."""
    config = VitConfig(patch=patch)
    assert grid_of(config, size) == grid
    assert VIT.rows(config, size) == math.prod(grid)


def test_large_images_keep_their_aspect() -> None:
    """An image of too many patches is shrunk to the most that its aspect allows."""
    config = VitConfig(patch=16, max_patches=200)
    assert grid_of(config, (20000, 20000)) == (14, 14)
    assert grid_of(config, (10000, 20000)) == (10, 20)
    assert grid_of(config, (20000, 5)) == (200, 1)
    assert grid_of(config, (5, 20000)) == (1, 200)


@given(
    size=st.tuples(st.integers(1, 20000), st.integers(1, 20000)),
    patch=st.integers(1, 40),
    most=st.integers(1, 5000),
)
def test_no_image_has_too_many_patches(size: tuple[int, int], patch: int, most: int) -> None:
    """Between one patch and the most allowed, whatever the image."""
    assert 1 <= VIT.rows(VitConfig(patch=patch, max_patches=most), size) <= most


def _check_pixels(_rank: int) -> None:
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    image = Image.fromarray(values)
    assert VIT.measure(image) == (8, 8)
    pixels = VIT.prepare(SMALL, image)["pixels"]
    assert pixels.shape == (1, 8, 8)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[0], torch.from_numpy(values) / 127.5 - 1)
    colour = VitConfig(patch=4, channels=3, max_patches=6)
    for mode, size in (("L", (8, 8)), ("RGBA", (5, 7)), ("P", (1, 1)), ("1", (300, 2)), ("CMYK", (9, 40))):
        image = Image.new(mode, size)
        found = VIT.prepare(colour, image)["pixels"]
        down, across = grid_of(colour, VIT.measure(image))
        assert found.shape == (3, down * 4, across * 4)
        assert found.abs().max() <= 1
    assert torch.equal(VIT.prepare(colour, Image.new("RGB", (4, 4), "white"))["pixels"], torch.ones(3, 4, 4))


def test_prepared_pixels(run_ranks: Callable[..., list[Any]]) -> None:
    """Any mode and size becomes channels, whole patches and values from -1 to 1; the right size stays as it is."""
    run_ranks(1, _check_pixels)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch": 0}, r"config\.patch: expected a whole number from 1, got 0"),
        ({"channels": 2}, r"config\.channels: expected 1 \(grey\) or 3 \(colour\), got 2"),
        ({"layers": 0}, r"config\.layers: expected a whole number from 1, got 0"),
        ({"width": 18}, r"config\.width: expected a multiple of 4, for 4 heads and positions in four parts, got 18"),
        ({"width": 16, "heads": 6}, r"config\.width: expected a multiple of 12, for 6 heads"),
        ({"projector": -1}, r"config\.projector: expected a whole number from 0, got -1"),
        ({"max_patches": 0}, r"config\.max_patches: expected a whole number from 1, got 0"),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """Each setting out of range is named."""
    with pytest.raises(ConfigError, match=message):
        VitConfig(**values)


def test_parts_of_stages() -> None:
    """Every stage holds some of the encoder, the last one the projector."""
    assert VIT.stages is not None
    assert VIT.stages.parts(SMALL, Stage()) == {"encoder", "projector"}
    assert VIT.stages.parts(SMALL, Stage(0, 2)) == {"encoder"}
    assert VIT.stages.parts(SMALL, Stage(1, 2)) == {"encoder", "projector"}
    assert VIT.stages.message_rows(SMALL, (8, 12)) == 6
    assert VIT.stages.width(SMALL) == 16


def test_registers_as_vit() -> None:
    """The entry point that mimo reads leads to the spec."""
    (entry,) = entry_points(group="mimo.encoders", name="vit")
    assert entry.load().mimo_register_encoders() == [VIT] == mimo_register_encoders()


def test_registering_imports_no_torch() -> None:
    """Planning a layout with this encoder needs no torch."""
    code = "import sys, mimo_encoder_vision._plugin; assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text


def test_the_formula_counts_the_products_of_a_forward() -> None:
    """Multiplications and weights by part are those that PyTorch counts, keys' missing biases and norms aside."""
    sizes = [(8, 12), (4, 4)]
    items = [{"pixels": torch.randn(1, *size)} for size in sizes]
    module: Any = VIT.build(SMALL, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(items)
    by_operation = counter.get_flop_counts()["Global"]
    assert VIT.flops is not None
    found = VIT.flops(SMALL, 24, Stage(), "none", sizes)
    assert list(found) == ["encoder", "projector"]
    products = (count for operation, count in by_operation.items() if "attention" not in str(operation))
    assert sum(work.weighted for work in found.values()) == sum(products)
    for part, work in found.items():
        prefixes = VIT.parts[part]
        weights = sum(
            parameter.numel() for name, parameter in module.named_parameters() if name.startswith(tuple(prefixes))
        )
        assert abs(weights - work.weights) <= (5 * SMALL.layers + 2) * SMALL.width


def test_stages_of_the_formula_share_out_the_whole() -> None:
    """What both stages take adds up, and recomputing keeps less."""
    assert VIT.flops is not None
    whole, *stages = (VIT.flops(SMALL, 24, stage, "none", [(8, 8)]) for stage in (Stage(), Stage(0, 2), Stage(1, 2)))
    assert [list(stage) for stage in stages] == [["encoder"], ["encoder", "projector"]]
    assert sum(stage["encoder"].forward for stage in stages) == whole["encoder"].forward
    kept = [
        VIT.flops(SMALL, 24, Stage(), recompute, [(8, 8)])["encoder"].split
        for recompute in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
