"""A vision encoder over images at their own sizes: packed, and padded to the largest of the batch.

Padded it is `transformers`' model with the same weights, which masks the padding; and ours, of as many images that are
all as large as the largest, where nothing need be masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from mimo.model import ProjectorConfig
from mimo.model.runtime import read_hf
from mimo_encoder_vision import SIGLIP

PATCH, WIDTH, LAYERS = 32, 256, 4
SIZES = (
    (480, 640), (480, 640), (640, 428), (480, 640), (480, 640), (407, 640), (480, 640), (427, 640),
    (343, 500), (640, 621), (640, 480), (427, 640), (640, 424), (480, 640), (424, 640), (480, 640),
)  # fmt: skip
"""Heights and widths in pixels of the first photographs of COCO's validation set of 5,000 (Lin et al. 2014,
arXiv:1405.0312), as the repository ultralytics/yolov3 lists them in data/5k.shapes."""
GRIDS = tuple((height // PATCH, width // PATCH) for height, width in SIZES)


def steps() -> tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]:
    """Return forward and backward of ours packed, of ours with all images as the largest, and of theirs padded.

    Each returns the mean square of the rows of the images.
    """
    torch.manual_seed(0)
    model = Siglip2VisionModel(
        Siglip2VisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 64,
            patch_size=PATCH,
            num_patches=256,
            vision_use_head=False,
        )
    )
    model.set_attn_implementation("sdpa")
    largest = max(GRIDS, key=lambda grid: grid[0] * grid[1])
    return _ours(model, GRIDS), _ours(model, [largest] * len(GRIDS)), _theirs(model)


def _images(grids: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return an image [3, height, width] of each grid of patches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, down * PATCH, across * PATCH, generator=generator) for down, across in grids]


def _ours(model: Any, grids: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
    family = next(family for family in SIGLIP.hf if family.model_type == "siglip2_vision_model")
    projector = ProjectorConfig(kind="linear", bias=False)  # one product more than theirs has
    config = SIGLIP.config(**family.settings(model.config.to_dict()), projector=projector)
    module = SIGLIP.build(config, WIDTH)
    read_hf(module, family, config, model.state_dict())
    with torch.no_grad():
        module.get_parameter("projector.linear.weight").copy_(torch.eye(WIDTH))
    items = [{"pixels": image.unsqueeze(0)} for image in _images(grids)]

    def step() -> Tensor:
        for parameter in module.parameters():
            parameter.grad = None
        loss: Tensor = module(items).square().mean()
        loss.backward()
        return loss.detach()

    return step


def _theirs(model: Any) -> Callable[[], Tensor]:
    """Return the step over patches that are cut and padded already."""
    longest = max(down * across for down, across in GRIDS)
    pixels = torch.zeros(len(GRIDS), longest, 3 * PATCH**2)
    mask = torch.zeros(len(GRIDS), longest, dtype=torch.long)
    for row, image in enumerate(_images(GRIDS)):
        patches = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 3, 4, 0).reshape(-1, 3 * PATCH**2)
        pixels[row, : len(patches)], mask[row, : len(patches)] = patches, 1
    used, shapes = mask.bool(), torch.tensor(GRIDS)

    def step() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        rows = model(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes).last_hidden_state
        loss: Tensor = rows[used].square().mean()
        loss.backward()
        return loss.detach()

    return step
