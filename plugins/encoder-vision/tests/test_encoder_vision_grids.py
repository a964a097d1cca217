"""How many patches and rows images become, from their sizes alone."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from mimo.model import ProjectorConfig
from mimo_encoder_vision import CLIP, SIGLIP, VIT, ClipConfig, SiglipConfig, VitConfig
from mimo_encoder_vision._grids import grids_of, native_grid, packed_rows_of, row_grid_of, rows_of, tiles_of

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 20000))


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
    assert native_grid(config, size) == grid
    assert VIT.rows(config, size) == math.prod(grid)


def test_large_images_keep_their_aspect() -> None:
    """An image of too many patches is shrunk to the most that its aspect allows."""
    config = VitConfig(patch=16, max_patches=200)
    assert native_grid(config, (20000, 20000)) == (14, 14)
    assert native_grid(config, (10000, 20000)) == (10, 20)
    assert native_grid(config, (20000, 5)) == (200, 1)
    assert native_grid(config, (5, 20000)) == (1, 200)


@given(
    size=st.tuples(SIDES, SIDES),
    patch=st.integers(1, 40),
    most=st.integers(16, 5000),
    shuffle=st.sampled_from((1, 2, 4)),
    enlarge=st.booleans(),
)
def test_no_image_has_too_many_patches(
    size: tuple[int, int], patch: int, most: int, shuffle: int, *, enlarge: bool
) -> None:
    """Between one row and the most allowed, whatever the image, and always whole squares of joined patches."""
    projector = ProjectorConfig(shuffle=shuffle)
    config = VitConfig(patch=patch, max_patches=most, projector=projector, enlarge=enlarge)
    down, across = native_grid(config, size)
    assert down % shuffle == across % shuffle == 0
    assert 1 <= down * across <= most
    assert VIT.rows(config, size) == down * across // shuffle**2


@given(size=st.tuples(SIDES, SIDES), patch=st.integers(1, 40), most=st.integers(1, 1024))
def test_enlarged_images_are_those_of_naflex(size: tuple[int, int], patch: int, most: int) -> None:
    """Its published processor finds the same size for every image."""
    config = VitConfig(patch=patch, max_patches=most, enlarge=True)
    wanted = get_image_size_for_max_num_patches(*size, patch_size=patch, max_num_patches=most)
    assert tuple(patches * patch for patches in native_grid(config, size)) == wanted


@given(size=st.tuples(SIDES, SIDES), most=st.integers(1, 24), side=st.integers(16, 500))
def test_tiles_are_those_of_the_published_processors(size: tuple[int, int], most: int, side: int) -> None:
    """InternVL's way of choosing a grid, in exact numbers."""
    across, down = get_optimal_tiled_canvas(size, (side, side), 1, most)
    assert tiles_of(VitConfig(mode="tiles", size=side, max_tiles=most), size) == (down, across)


@pytest.mark.parametrize(
    ("size", "tiles", "changes"),
    [
        ((224, 224), 1, {}),
        ((448, 448), 4 + 1, {}),
        ((448, 448), 4, {"thumbnail": False}),
        ((448, 448), 1, {"max_tiles": 3}),
        ((100, 1000), 10 + 1, {}),
        ((20000, 1), 12 + 1, {}),
        ((1, 1), 1, {}),
    ],
)
def test_rows_of_tiles(size: tuple[int, int], tiles: int, changes: dict[str, Any]) -> None:
    """Each tile has rows of its own, the thumbnail too; a single tile needs no thumbnail."""
    config = attrs.evolve(ClipConfig(mode="tiles", size=224, patch=14, projector=ProjectorConfig(shuffle=2)), **changes)
    assert grids_of(config, size) == [(16, 16)] * tiles
    assert rows_of(config, size) == tiles * 64
    assert packed_rows_of(config, size) == tiles * 257
    kept = attrs.evolve(config, projector=ProjectorConfig(), keep_class_token=True)
    assert CLIP.rows(kept, size) == tiles * 257
    queries = attrs.evolve(kept, projector=ProjectorConfig(kind="resampler", hidden=64, queries=5))
    assert CLIP.rows(queries, size) == tiles * 5


def test_fixed_images_all_have_as_many_rows() -> None:
    """Pixels that make no whole patch are left out."""
    config = SiglipConfig(size=384, patch=14)
    assert {SIGLIP.rows(config, size) for size in ((1, 1), (20000, 3), (384, 384))} == {27**2}


def test_where_rows_lie() -> None:
    """Those of a picture or of its tiles lie down and across; with class tokens or resampled they make no grid."""
    config = VitConfig(patch=4, projector=ProjectorConfig(shuffle=2))
    assert row_grid_of(config, (16, 40)) == (1, 2, 5)
    tiles = ClipConfig(mode="tiles", size=28)
    assert row_grid_of(tiles, (28, 28)) == (1, 2, 2)
    assert row_grid_of(tiles, (56, 28)) == (3, 2, 2)
    assert row_grid_of(ClipConfig(keep_class_token=True), (28, 28)) is None
    resampler = ProjectorConfig(kind="resampler", hidden=8)
    assert row_grid_of(attrs.evolve(config, projector=resampler), (16, 40)) is None
