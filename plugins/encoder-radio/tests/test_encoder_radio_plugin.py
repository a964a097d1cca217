"""The plugin as mimo meets it: settings, sizes and preparation, and how it registers."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import ProjectorConfig, Stage
from mimo_encoder_radio import RADIO, RadioConfig
from mimo_encoder_radio._grids import grids_of, native_grid
from mimo_encoder_radio._plugin import mimo_register_encoders
from mimo_encoder_radio._positions import corners

SHUFFLED = ProjectorConfig(shuffle=2)
SMALL = RadioConfig(patch=4, width=16, layers=2, heads=2, intermediate=20, positions=6, projector=SHUFFLED)
TILES = RadioConfig(patch=4, width=16, heads=2, mode="tiles", size=8, max_tiles=6, projector=SHUFFLED)


@pytest.mark.parametrize(
    ("size", "bounds", "shuffle", "grid"),
    [
        ((32, 48), (1, 1024), 1, (2, 3)),
        ((33, 1), (1, 1024), 1, (3, 1)),
        ((33, 50), (1, 1024), 2, (4, 4)),
        ((64, 64), (64, 1024), 2, (8, 8)),
        ((160, 640), (1, 100), 2, (4, 20)),
        ((20000, 20000), (1024, 13312), 2, (114, 116)),
        ((1, 1), (1024, 13312), 2, (32, 32)),
        ((20000, 5), (1, 200), 2, (100, 2)),
        ((5, 20000), (1, 200), 2, (2, 100)),
    ],
)
def test_images_become_whole_patches_within_bounds(
    size: tuple[int, int], bounds: tuple[int, int], shuffle: int, grid: tuple[int, int]
) -> None:
    """Each side is rounded up, the area brought within bounds, and each side rounded to what the projector joins."""
    least, most = bounds
    config = RadioConfig(min_patches=least, max_patches=most, projector=ProjectorConfig(shuffle=shuffle))
    assert native_grid(config, size) == grid
    assert RADIO.rows(config, size) == math.prod(grid) // shuffle**2


@given(
    size=st.tuples(st.integers(1, 20000), st.integers(1, 20000)),
    patch=st.integers(1, 40),
    bounds=st.tuples(st.integers(1, 5000), st.integers(16, 5000)).map(sorted),
    shuffle=st.sampled_from([1, 2, 4]),
)
def test_no_image_has_too_many_patches(size: tuple[int, int], patch: int, bounds: list[int], shuffle: int) -> None:
    """At most as many as allowed, in sides that can be joined, whatever the image."""
    least, most = bounds[0], max(16, bounds[1])
    config = RadioConfig(patch=patch, min_patches=least, max_patches=most, projector=ProjectorConfig(shuffle=shuffle))
    down, across = native_grid(config, size)
    assert down * across <= most
    assert down % shuffle == across % shuffle == 0
    assert min(down, across) >= 1
    height, width = size
    if max(size) < 4 * min(size) and least * 4 < most and most > 256:  # else there is no grid near its shape
        assert down * across >= least * 0.8
        assert 0.5 < (down * width) / (across * height) < 2 or max(down, across) <= 4 * shuffle


def _theirs(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Return the grid of Nemotron 3 Nano Omni's image processor, by its arithmetic with numbers that are rounded."""
    down, across = round(height / 16 + 0.5), round(width / 16 + 0.5)
    factor = min(math.sqrt(most / (down * across)), 1.0)
    down, across = math.floor(factor * down), math.floor(factor * across)
    if down * across < least:
        factor = math.sqrt(least / (down * across))
        down, across = math.ceil(factor * down), math.ceil(factor * across)
    if down % 2:
        down += 1 if (down + 1) * across <= most else -1
    if across % 2:
        across += 1 if down * (across + 1) <= most else -1
    return down, across


def test_grids_are_those_of_nemotron() -> None:
    """Of images whose sides are no whole patches; theirs may round up whole ones."""
    config = RadioConfig(min_patches=1024, max_patches=13312, projector=SHUFFLED)
    for height in range(101, 5000, 174):
        for width in range(103, 5000, 174):
            if height % 16 and width % 16:
                assert native_grid(config, (height, width)) == _theirs(height, width, 1024, 13312)


def test_images_become_tiles() -> None:
    """Tiles in the arrangement nearest to the image's shape, and all of it once more."""
    for size, tiles in (((8, 8), 1), ((9, 16), 3), ((16, 24), 7), ((30, 5), 7), ((1, 1), 1), ((8, 17), 3)):
        assert grids_of(TILES, size) == [(2, 2)] * tiles
        assert RADIO.rows(TILES, size) == tiles
        assert RADIO.grid is not None
        assert RADIO.grid(TILES, size) == (tiles, 1, 1)


def test_grids_for_the_language_model_are_all_rows() -> None:
    """Joined patches lie as in the picture; where there is more than these, rows follow each other as in a text."""
    assert RADIO.grid is not None
    assert RADIO.grid(SMALL, (16, 30)) == (1, 2, 4)
    kept = RadioConfig(patch=4, keep=(0, 1))
    assert RADIO.grid(kept, (16, 30)) is None
    assert RADIO.rows(kept, (16, 30)) == 34


def _check_pixels(_rank: int) -> None:
    generator = np.random.default_rng(3)
    values = generator.integers(0, 256, (16, 24, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (SMALL.mean, SMALL.std))
    plain = torch.from_numpy(values).permute(2, 0, 1).float()
    assert RADIO.measure(image) == (16, 24)
    torch.testing.assert_close(RADIO.prepare(SMALL, image)["pixels"], (plain[None] / 255 - mean) / std)

    def resized(height: int, width: int) -> torch.Tensor:
        return interpolate(plain[None], (height, width), mode="bicubic", antialias=True, align_corners=False)

    shrunk = RadioConfig(patch=4, max_patches=8)
    pixels = RADIO.prepare(shrunk, image)["pixels"]
    torch.testing.assert_close(pixels, (resized(8, 12) / 255 - mean) / std, rtol=1e-4, atol=1e-4)
    tiles = (RADIO.prepare(TILES, image)["pixels"] * std + mean) * 255
    wanted = [plain[:, y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8, 16)]
    torch.testing.assert_close(tiles, torch.cat((torch.stack(wanted), resized(8, 8))), rtol=1e-3, atol=1e-2)
    for config in (SMALL, TILES, RadioConfig(patch=4, channels=1, mean=(0.5,), std=(0.5,))):
        for mode, size in (("L", (8, 8)), ("RGBA", (5, 7)), ("P", (1, 1)), ("1", (300, 2)), ("CMYK", (9, 40))):
            made = Image.new(mode, size)
            found = RADIO.prepare(config, made)["pixels"]
            grids = grids_of(config, RADIO.measure(made))
            assert found.dtype == torch.float32
            assert found.shape == (len(grids), config.channels, 4 * grids[0][0], 4 * grids[0][1])


def test_prepared_pixels(run_ranks: Callable[..., list[Any]]) -> None:
    """Normed pixels, resized in float32 as PyTorch would with a wider filter where they shrink; any mode will do."""
    run_ranks(1, _check_pixels)


def _check_extremes(_rank: int) -> None:
    for size in ((1, 1), (20000, 1), (1, 20000), (2, 20000), (300, 20000)):
        image = Image.new("RGB", size[::-1], "white")
        for config in (SMALL, TILES, RadioConfig()):
            pixels = RADIO.prepare(config, image)["pixels"]
            rows = [(one.shape[1] // config.patch, one.shape[2] // config.patch) for one in pixels]
            assert rows == grids_of(config, size)
            assert pixels.numel() <= 3 * config.patch**2 * max(config.max_patches, 7 * 4)  # seven tiles of four patches
            torch.testing.assert_close(pixels, pixels[:1, :, :1, :1].expand_as(pixels))


def test_images_of_any_size(run_ranks: Callable[..., list[Any]]) -> None:
    """From one pixel to lines of 20,000; nothing becomes larger than the encoder takes."""
    run_ranks(1, _check_extremes)


def _check_corners(_rank: int) -> None:
    side = 7
    table = torch.randn(side * side, 5)
    for grid in ((1, 1), (3, 2), (7, 7), (4, 19), (30, 1)):
        index, share = corners(grid, side=side)
        longest = max(grid)
        square = interpolate(table.T.view(1, 5, side, side), (longest, longest), mode="bilinear", align_corners=False)
        wanted = square[0, :, : grid[0], : grid[1]].flatten(1).T
        torch.testing.assert_close((table[index] * share[:, :, None]).sum(1), wanted)


def test_positions_are_a_crop_of_the_table(run_ranks: Callable[..., list[Any]]) -> None:
    """The table is resized to the longer side, and its corner taken."""
    run_ranks(1, _check_corners)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch": 0}, r"config\.patch: expected 1 or more, got 0"),
        ({"channels": 2}, r"config\.channels: expected 1 \(grey\) or 3 \(colour\), got 2"),
        ({"channels": 1}, r"config\.mean: expected a number for each of 1 channels, got \[0\.48145466"),
        ({"std": (1.0, 0.0, 1.0)}, r"config\.std: expected a number above 0 for each of 3 channels, got \[1\.0, 0\.0"),
        ({"width": 16, "heads": 6}, r"config\.width: expected a multiple of 6, the heads, got 16"),
        ({"eps": 0.0}, r"config\.eps: expected a finite number above 0, got 0\.0"),
        ({"class_tokens": 0}, r"config\.class_tokens: expected 1 or more, got 0"),
        ({"keep": (10,)}, r"config\.keep: expected ascending numbers of the 10 class tokens .*, from 0, got \[10\]"),
        ({"keep": (1, 0)}, r"config\.keep: expected ascending numbers"),
        ({"keep": (0,), "projector": SHUFFLED}, r"config\.keep: expected none, since a projector that shuffles joins"),
        ({"min_patches": 9, "max_patches": 8}, r"config\.max_patches: expected at least min_patches, 9, and the 1 "),
        (
            {"max_patches": 3, "projector": SHUFFLED},
            r"max_patches: expected at least .* the 4 that the projec",
        ),
        ({"mode": "tiles", "size": 24}, r"config\.size: expected a multiple of 16 pixels, .*, got 24"),
        (
            {"max_tiles": 3},
            r"max_tiles: expected none, since images of mode 'native' have no use for it, got 3",
        ),
        ({"mode": "tiles", "min_patches": 3}, r"min_patches: expected none, since images of mode 'tiles' have no use"),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """Each setting out of range, or of no use, is named."""
    with pytest.raises(ConfigError, match=message):
        RadioConfig(**values)


def test_parts_of_stages() -> None:
    """Every stage holds some of the encoder, the last one the projector; class tokens pass between them."""
    assert RADIO.stages is not None
    assert RADIO.stages.parts(SMALL, Stage()) == {"encoder", "projector"}
    assert RADIO.stages.parts(SMALL, Stage(0, 2)) == {"encoder"}
    assert RADIO.stages.message_rows(SMALL, (8, 12)) == 10 + 2 * 4
    assert RADIO.stages.message_rows(TILES, (8, 17)) == 3 * (10 + 4)
    assert RADIO.stages.width(SMALL) == 16


def test_registers_as_radio() -> None:
    """The entry point that mimo reads leads to the spec."""
    (entry,) = entry_points(group="mimo.encoders", name="radio")
    assert entry.load().mimo_register_encoders() == [RADIO] == mimo_register_encoders()


def test_registering_imports_no_torch() -> None:
    """Planning a layout with this encoder needs no torch."""
    code = "import sys, mimo_encoder_radio._plugin; assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text


def test_the_readme_s_settings_are_settings() -> None:
    """They make an encoder, with the projector of Nemotron."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    config = tomllib.loads(example)["modules"]["vision"]["config"]
    projector = ProjectorConfig(**config.pop("projector"))
    assert projector.shuffle == 2
    assert RADIO.rows(RadioConfig(**config, projector=projector), (512, 512)) == 256


def _products(counter: FlopCounterMode) -> int:
    """Return the operations counted so far in products with weights."""
    by_operation = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in by_operation.items() if "attention" not in str(operation))


def test_the_formula_counts_the_products() -> None:
    """Multiplications, backward too, and weights by part are those that PyTorch counts."""
    sizes = [(8, 12), (4, 4), (30, 5)]
    assert RADIO.flops is not None
    for config in (SMALL, TILES, RadioConfig(patch=4, width=16, layers=2, heads=2, keep=(0, 4))):
        items = [RADIO.prepare(config, Image.new("RGB", size[::-1])) for size in sizes]
        module: Any = RADIO.build(config, 24)
        with FlopCounterMode(display=False) as counter:
            rows = module(items)
            forward = _products(counter)
            rows.sum().backward()
        found = RADIO.flops(config, 24, Stage(), "none", sizes)
        assert list(found) == ["encoder", "projector"]
        assert sum(work.weighted for work in found.values()) == forward
        assert sum(2 * work.weighted - work.of_items for work in found.values()) == _products(counter) - forward
        for part, work in found.items():
            prefixes = tuple(RADIO.parts[part])
            weights = (one.numel() for name, one in module.named_parameters() if name.startswith(prefixes))
            assert sum(weights) == work.weights
        stages = [RADIO.flops(config, 24, Stage(index, 2), "none", sizes) for index in range(2)]
        assert [list(stage) for stage in stages] == [["encoder"], ["encoder", "projector"]]
        assert sum(stage["encoder"].forward for stage in stages) == found["encoder"].forward


def test_readme_program(capsys: pytest.CaptureFixture[str]) -> None:
    """An image becomes the rows that it says."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)
