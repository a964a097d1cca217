"""Images are cut into patches at once where they are of one size, and one after the other where they aren't."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mimo.model.runtime import packed_patches

SIZES = ((4, 6), (4, 6), (7, 5), (4, 6), (2, 3), (2, 2))
"""Of images: one that comes again, and some that are no whole number of patches of 2."""


def one_by_one(images: list[Tensor], *, zeros: int, channels_last: bool) -> Tensor:
    """Return the patches of images, each cut out by itself."""
    found = [torch.empty(0, 12)]
    for image in images:
        found.append(torch.zeros(zeros, 12))
        for down in range(image.shape[1] // 2):
            for across in range(image.shape[2] // 2):
                patch = image[:, 2 * down : 2 * down + 2, 2 * across : 2 * across + 2]
                found.append((patch.permute(1, 2, 0) if channels_last else patch).reshape(1, 12))
    return torch.cat(found)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize("count", [0, 1, len(SIZES)])
def test_patches_are_those_of_each_image(count: int, zeros: int, channels_last: bool) -> None:
    """Row by row, behind as many rows of zeros as are asked for."""
    images = [torch.randn(3, *size) for size in SIZES[:count]]
    found = packed_patches(
        iter(images), patch=2, like=torch.empty(0), width=12, zeros=zeros, channels_last=channels_last
    )
    assert torch.equal(found, one_by_one(images, zeros=zeros, channels_last=channels_last))
