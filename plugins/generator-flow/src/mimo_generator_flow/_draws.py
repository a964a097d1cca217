"""What is drawn for each picture: by its key alone, so that no layout and no other picture changes it.

Shapes: N pictures, L patches of each, E numbers of a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mimo.model.runtime import fold, normal, to_device, uniform
from mimo_generator_flow._config import FlowConfig

_NOISE, _TIME, _DROP = range(3)
"""What a picture's key is folded with, one number for each use."""


def draw_noise(config: FlowConfig, keys: Tensor, *, device: torch.device) -> Tensor:
    """Return what pictures begin as, fp32, [N·L, E], for keys [N]."""
    width = config.patch_width
    return normal(fold(to_device(keys, device), _NOISE), config.targets * width).view(-1, width)


def draw_times(config: FlowConfig, keys: Tensor, *, device: torch.device) -> Tensor:
    """Return at which moment between noise, 0, and data, 1, each picture is looked at, fp32, [N, 1]."""
    own = fold(keys, _TIME)
    times = normal(own, 1).sigmoid() if config.time == "logit_normal" else uniform(own, 1)
    return to_device(times, device)


def draw_dropped(config: FlowConfig, keys: Tensor) -> list[bool]:
    """Return which pictures do without the rows that they are to be made from."""
    dropped: list[bool] = (uniform(fold(keys, _DROP), 1) < config.drop_condition).flatten().tolist()
    return dropped
