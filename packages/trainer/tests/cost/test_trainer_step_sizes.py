"""Sizes of a step's samples, from an index."""

from __future__ import annotations

import random

import numpy as np
import pytest
from eye import make_job, on, table

from mimo.data import ItemSize, SampleSize, SampleSizes
from mimo.trainer.cost.step_sizes import StepSizes, numbered


@pytest.mark.parametrize("largest", [3, 1 << 12, (1 << 32) - 1])
def test_sizes_of_an_index_are_those_of_its_items(largest: int) -> None:
    """Of one to three numbers, small or far too large for a table; without other modalities, cut and unread ones."""
    rng = random.Random(largest)

    def item(index: int) -> ItemSize:
        return ItemSize(
            modality=rng.choice(("image", "image", "audio")),
            number=index,
            size=tuple(rng.choice((0, rng.randint(0, largest), largest)) for _ in range(rng.choice((0, 1, 2, 2, 3)))),
            rows=rng.randint(1, 9),
            kept=rng.random() < 0.8,
            asked=rng.choice((0, 0, 2)),
            role=rng.choice(("output", "both")),
        )

    samples = [
        SampleSize(tokens=rng.randint(1, 99), ids=1, targets=1, weight=1.0, items=tuple(map(item, range(index % 7))))
        for index in range(60)
    ]
    found = StepSizes.of_index(
        make_job(table({"vision": on(0, 1), "language": on(0, 1)})), SampleSizes.of(("audio", "image"), samples)
    )
    images = found.items["image"]
    assert found.lengths.tolist() == [sample.tokens for sample in samples]
    assert len(images.sizes) == len(set(images.sizes))
    assert list(
        zip(
            images.samples.tolist(),
            [images.sizes[which] for which in images.of_item.tolist()],
            images.rows.tolist(),
            strict=True,
        )
    ) == [
        (position, one.size, one.rows)
        for position, sample in enumerate(samples)
        for one in sample.items
        if one.kept and one.modality == "image" and (one.role == "both" or not one.asked)
    ]


@pytest.mark.parametrize("values", [[], [0], [7, 7], [5, 0, 5, 2], [1 << 60, 3, 1 << 60]])
def test_numbers_are_numbered_in_order(values: list[int]) -> None:
    """The least is 0, equal ones are the same, and none is left out; by a table or without one."""
    assert numbered(np.array(values, dtype=np.int64)).tolist() == [sorted(set(values)).index(one) for one in values]
