"""What an optimizer's settings mean for each parameter, written out once more for the oracle's plain loop.

It reads the same tables as `mimo train`, and shares nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

Table = Mapping[str, Any]


class PlainRules:
    """The settings of trained parameters.

    Args:
        settings: the whole file.
        trained: by full name.
    """

    def __init__(self, settings: Table, trained: Mapping[str, nn.Parameter]) -> None:
        self._settings = settings
        self._trained = trained
        self._keys = {name: dict(_keys_of(settings, name)) for name in trained}

    def make_adamw(self) -> torch.optim.AdamW:
        """Return torch's AdamW with a group for each parameter."""
        groups = [
            {
                "params": [value],
                "lr": keys["lr"],
                "weight_decay": keys["weight_decay"],
                "betas": keys.get("betas", (0.9, 0.95)),
                "eps": keys["eps"],
            }
            for value, keys in zip(self._trained.values(), self._keys.values(), strict=True)
        ]
        return torch.optim.AdamW(groups, foreach=False)

    def set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Give each group the learning rate of a step."""
        for group, keys in zip(optimizer.param_groups, self._keys.values(), strict=True):
            group["lr"] = _rate(keys, step, self._settings["run"]["steps"])

    def clip(self) -> None:
        """Shorten the gradients of each clip group to the longest that they may be together; 0: as long as they are."""
        groups: dict[str, list[nn.Parameter]] = {}
        by_module = self._settings["optimizer"].get("clip_by") == "module"
        for name, keys in self._keys.items():
            usual = name.partition(".")[0] if by_module else ""
            groups.setdefault(keys.get("clip_group") or usual, []).append(self._trained[name])
        optimizer = self._settings["optimizer"]
        for group, members in groups.items():
            clip, norm = optimizer.get("clip_groups", {}).get(group, optimizer["clip"]), _norm(members)
            if 0 < clip < norm:
                for value in members:
                    if value.grad is not None:
                        value.grad *= clip / norm


def _keys_of(settings: Table, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a parameter: of all modules, of its own, of the first pattern that its name matches."""
    module, _, path = name.partition(".")
    shared, own = settings["optimizer"], settings["modules"][module].get("optimizer", {})
    yield from shared.items()
    yield from own.items()
    matching = [keys for glob, keys in own.get("patterns", {}).items() if fnmatchcase(path, glob)]
    matching += [keys for glob, keys in shared.get("patterns", {}).items() if fnmatchcase(name, glob)]
    if matching:
        yield from matching[0].items()


def _rate(keys: Table, step: int, steps: int) -> float:
    """Return the learning rate of a step: it climbs, then stays or falls along a line or half a cosine."""
    highest, climbs = float(keys["lr"]), int(keys.get("lr_warmup_steps", 0))
    if step < climbs:
        return highest * step / climbs
    schedule = keys.get("lr_schedule", "constant")
    if schedule == "constant":
        return highest
    lowest, end = keys.get("lr_min", 0.0), keys.get("lr_decay_steps", 0) or steps
    if step >= end:
        return float(lowest)
    falls = climbs + keys.get("lr_stable_steps", 0)
    done = max(step - falls, 0) / (end - falls)
    left = 1 - done if schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return float(lowest + (highest - lowest) * left)


def _norm(parameters: list[nn.Parameter]) -> float:
    given = [value.grad.detach() for value in parameters if value.grad is not None]
    return math.sqrt(sum(float(value.double().square().sum()) for value in given))
