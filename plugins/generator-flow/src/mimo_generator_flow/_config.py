"""The settings of ``flow``. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from mimo.hooks import ConfigError, check_at_most, from_zero, is_rate
from mimo.model import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_PATCH,
    MAX_PIXELS,
    MAX_ROWS,
    MAX_WIDTH,
    Activation,
    Reads,
)

# A config doesn't know which module it belongs to, so its errors name the setting from there on.
WHERE = "config"
MAX_STEPS = 10_000
"""Of the solver."""
_LIMITS: Mapping[str, int] = {
    "height": MAX_PIXELS,
    "width": MAX_PIXELS,
    "patch": MAX_PATCH,
    "hidden": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "heads": MAX_HEADS,
    "intermediate": MAX_WIDTH,
    "steps": MAX_STEPS,
    "queries": MAX_LEARNED_ROWS,
}


@attrs.frozen(kw_only=True)
class FlowConfig:
    """Settings of ``flow``, ``modules.<name>.config``.

    Args:
        height: of the pictures that it makes, in pixels, a multiple of ``patch``; those that it is trained by are
            stretched to this size.
        width: likewise.
        channels: 1 for grey pictures, 3 for colour.
        patch: side of a patch in pixels.
        resample: how pixels are interpolated where a picture is stretched.
        hidden: width of a row inside the generator, a multiple of 4 and of ``heads``.
        layers: number of layers.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        activation: inside the feed-forward part.
        norm_eps: added to variances before the root, in all norms.
        reads: from which rows of the language model a picture is made: all of the sample before its placeholder, or
            those of the placeholder itself.
        queries: rows of the placeholder in the language model.
        drop_condition: the rate at which in training a picture is made from a learned row instead of those of the
            language model, so that it may be guided.
        time: how moments between noise and data are drawn in training: ``uniform``, or ``logit_normal``, the logistic
            function of a standard normal number, mostly in the middle (Esser et al. 2024, arXiv:2403.03206, section
            3.1).
        solver: how the way from noise to data is followed: ``euler``, with one call of the network a step, or
            ``midpoint`` or ``heun``, with two, whose error shrinks with the square of the steps.
        steps: of the solver.
        guidance: how far a picture is moved from what the learned row alone would give towards what its own rows do
            (Ho and Salimans 2022, arXiv:2207.12598; there it is w + 1): 1 for no guidance, 0 for the learned row alone.
            With any other than 1 each call computes both.

    Raises:
        ConfigError: a value is out of range, or doesn't go with another.
    """

    height: int = 64
    width: int = 64
    channels: int = 3
    patch: int = 4
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    hidden: int = 384
    layers: int = 12
    heads: int = 6
    intermediate: int = 1536
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    reads: Reads = "before"
    queries: int = 1
    drop_condition: float = attrs.field(default=0.1, validator=is_rate(where=WHERE))
    time: Literal["uniform", "logit_normal"] = "uniform"
    solver: Literal["euler", "midpoint", "heun"] = "midpoint"
    steps: int = 25
    guidance: float = attrs.field(default=2.0, validator=from_zero(where=WHERE))

    def __attrs_post_init__(self) -> None:
        """Refuse what is out of range, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=WHERE)
        for key in _LIMITS:
            if getattr(self, key) < 1:
                raise refused(key, "1 or more", getattr(self, key))
        if self.channels not in (1, 3):
            raise refused("channels", "1 (grey) or 3 (colour)", self.channels)
        for key in ("height", "width"):
            if getattr(self, key) % self.patch:
                raise refused(key, f"a multiple of patch = {self.patch}", getattr(self, key))
        if self.targets > MAX_ROWS:
            raise refused("patch", f"one that makes at most {MAX_ROWS} patches of a picture", self.patch)
        if self.hidden % (multiple := math.lcm(4, self.heads)):
            raise refused(
                "hidden", f"a multiple of {multiple}, for {self.heads} heads and positions in four parts", self.hidden
            )
        if not 0 < self.norm_eps < 1:
            raise refused("norm_eps", "a number between 0 and 1", self.norm_eps)
        if self.guidance != 1 and not self.drop_condition:
            raise refused("guidance", "1, since without drop_condition nothing is learned to guide by", self.guidance)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a picture down and across."""
        return self.height // self.patch, self.width // self.patch

    @property
    def targets(self) -> int:
        """Number of patches of a picture, each of which has a loss."""
        down, across = self.grid
        return down * across

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.patch**2


def message_rows(config: FlowConfig, rows: int) -> int:
    """Return how many rows a picture sends between stages that is made from so many of the language model.

    They are those of the sequence, with one at least that it is made from, and one of what its time has become.
    """
    return max(rows, 1) + config.targets + 1


def refused(key: str, expected: str, got: Any) -> ConfigError:
    """Return the error of a setting."""
    return ConfigError(f"{WHERE}.{key}", expected=expected, got=repr(got))
