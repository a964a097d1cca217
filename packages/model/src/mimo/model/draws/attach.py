"""Gives the parts of a stage their sites and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mimo.model.draws.dropout import DrawsAtRandom, Site
from mimo.model.draws.rows import DrawKeys, ReadsDrawKeys


def attach_draws(
    module: nn.Module,
    keys: DrawKeys,
    *,
    device: torch.device,
    draws: Callable[[str], bool],
    first: Callable[[str], int] = lambda _path: 0,
) -> None:
    """Have the parts of a stage draw by ``keys``, and each by its place in the model.

    Args:
        module: the stage, with global layer indices in its paths.
        keys: of the stage; they know the module's name.
        device: where it computes.
        draws: of a part's path, whether it draws at all.
        first: of a part's path, which of all its features is the first here.
    """
    for path, part in module.named_modules():
        if isinstance(part, ReadsDrawKeys):
            part.draw_keys = keys
        if isinstance(part, DrawsAtRandom) and part.rate and draws(path):
            part.site = Site.of(f"{keys.module}.{path}", part.rate, keys=keys, device=device, first=first(path))
            keys.is_read = True
