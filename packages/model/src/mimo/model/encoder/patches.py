"""From images of unlike sizes to packed patches. Shapes: C channels, P patch side, T patches of all images."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional


def packed_patches(
    images: Iterable[Tensor], *, patch: int, like: Tensor, width: int, zeros: int = 0, channels_last: bool = False
) -> Tensor:
    """Return images [C, height, width] cut into patches [T, C·P·P], row by row, one image after the other.

    Args:
        images: of any sizes, or tiles of one; none is fine. Pixels beyond the last whole patch are left out.
        patch: P.
        like: gives device and dtype.
        width: C·P·P, for when there is no image to tell.
        zeros: rows of zeros before the patches of each image, where class tokens will be.
        channels_last: whether the elements of a patch lie as [P, P, C], not as [C, P, P].
    """
    order = (0, 2, 3, 4, 5, 1) if channels_last else (0, 2, 3, 1, 4, 5)
    pieces = []
    for _, group in groupby(images, key=lambda image: image.shape):  # neighbours of one size, at once
        same = list(group)
        whole = torch.stack(same) if len(same) > 1 else same[0][None]
        cut = whole.unfold(2, patch, patch).unfold(3, patch, patch).permute(order)
        rows = cut.reshape(len(cut), cut.shape[1] * cut.shape[2], width)
        pieces.append(functional.pad(rows, (0, 0, zeros, 0)).flatten(0, 1))
    return torch.cat(pieces).to(like) if pieces else like.new_empty(0, width)
