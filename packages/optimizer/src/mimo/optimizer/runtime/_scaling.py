"""The loss scale of fp16: what the loss is multiplied by, so that small gradients are not rounded to zero.

As in Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2), grown and shrunk by what steps come to. It follows from
what all ranks agree on in a step, so it is the same on all of them without a message of its own.
"""

from __future__ import annotations

import attrs

from mimo.hooks import Common, StateTree
from mimo.optimizer._specs import LOSS_SCALES

SCALING = "loss_scale"
"""Its name in the state of the optimizer, beside those of modules."""


@attrs.define(kw_only=True)
class LossScale:
    """One scale for all modules and ranks: halved by a step that was not finite, doubled by enough that were.

    Args:
        scale: what the loss of the coming step is multiplied by.
        growth_steps: finite steps in a row after which it doubles.
        good_steps: finite steps since it last changed.
    """

    scale: float
    growth_steps: int
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Take in whether the loss and all gradients of a step were finite; the same on every rank."""
        self.good_steps = self.good_steps + 1 if finite else 0
        least, most = LOSS_SCALES
        if not finite:
            self.scale = max(self.scale / 2, least)
        elif self.good_steps >= self.growth_steps:
            self.scale, self.good_steps = min(self.scale * 2, most), 0

    def state(self) -> StateTree:
        """Return what a checkpoint holds of it."""
        return {"scale": Common(self.scale), "good_steps": Common(self.good_steps)}

    def load(self, tree: StateTree) -> None:
        """Take back what `state` gave."""
        scale, good_steps = tree["scale"], tree["good_steps"]
        assert isinstance(scale, Common)
        assert isinstance(good_steps, Common)
        self.scale, self.good_steps = float(scale.value), int(good_steps.value)
