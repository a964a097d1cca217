"""Where rows of images lie in time, down and across, beside what Qwen2.5-VL finds for the same samples."""

from __future__ import annotations

import random
from typing import Any

import torch
from jobs import CPU, make_job
from tables import table
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel

from mimo.data.samples.grid_positions import Grid, grid_positions
from mimo.trainer.runtime import Microbatch, language_batch

MERGED = 2
"""Their encoder makes one row of so many patches down and across."""


def _theirs(length: int, items: list[tuple[int, Grid]]) -> list[list[int]]:
    with torch.device("meta"):
        model: Any = Qwen2_5_VLModel(Qwen2_5_VLConfig())
    kinds = torch.zeros(1, length, dtype=torch.int)
    for start, (frames, down, across) in items:
        kinds[0, start : start + frames * down * across] = 1
    grids = torch.tensor([(frames, MERGED * down, MERGED * across) for _, (frames, down, across) in items])
    positions, _ = model.get_rope_index(torch.zeros(1, length, dtype=torch.long), kinds, image_grid_thw=grids)
    places: list[list[int]] = positions[:, 0].T.tolist()
    return places


def test_images_among_text_lie_where_qwen2_vl_puts_them() -> None:
    """Any number of images of any grid, text before, between and after them."""
    rng = random.Random(1)
    for images in (1, 2, 3, 5):
        items: list[tuple[int, Grid]] = []
        length = rng.randint(0, 3)
        for _ in range(images):
            grid = (1, rng.randint(1, 6), rng.randint(1, 6))
            items.append((length, grid))
            length += grid[1] * grid[2] + rng.randint(1, 5)
        assert grid_positions(length, items).tolist() == _theirs(length, items)


def test_places_reach_the_language_model() -> None:
    """A job's encoder tells the grid of each of its pictures, and each context rank's batch has its rows' places."""
    job = make_job(table({"vision": {"ranks": [0]}, "language": {"ranks": [1, 2], "cp": 2}}))
    assert job.train is not None
    microbatch = Microbatch(job, job.train, range(4))
    grids = [item.grid for layout in microbatch.layouts for item in layout.items]
    assert any(grid is not None and min(grid[1:]) > 1 for grid in grids)
    for rank in range(2):
        batch = language_batch(microbatch.packed(job.language, 0, rank), job, CPU)
        assert batch.grid_positions is not None
        for places, position, sample in zip(batch.grid_positions, batch.positions, batch.samples, strict=True):
            whole = microbatch.layouts[int(sample)].grid_positions
            assert places.tolist() == ([int(position)] * 3 if whole is None else whole[int(position)].tolist())
