"""Items that would make the loss infinite."""

from __future__ import annotations

import math

import pytest
import torch

from mimo.trainer.items.finite_items import finite_item


def test_what_is_finite_is_given_as_it_is() -> None:
    """Whole numbers, empty tensors, and masks that are added to scores too."""
    mask = torch.tensor([0.0, -math.inf])
    item = {"ids": torch.arange(3), "pixels": torch.ones(2, 3), "none": torch.zeros(0, 2), "mask": mask}
    assert finite_item(item) is item


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_named(value: float) -> None:
    """By the tensor's name and the first place in it."""
    pixels = torch.ones(2, 3, dtype=torch.bfloat16)
    pixels[1, 2] = value
    with pytest.raises(
        ValueError, match=rf"^prepared, its 'pixels' holds {value} at \[1, 2\], and a step of it has no "
    ):
        finite_item({"ids": torch.arange(3), "pixels": pixels})
