"""Settings of the encoder, and how many rows a clip becomes, in whole numbers. Free of torch.

A clip's size is (frames, frames a second), from its header; the encoder hears it at 16,000 samples a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import attrs

from mimo.hooks import ConfigError, at_least, check_at_most, is_rate
from mimo.model import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_ROWS,
    MAX_WIDTH,
    ProjectorConfig,
    projected_rows,
)

RATE = 16_000
"""Samples a second that the encoder hears."""

HOP = 160
"""Samples from one frame of the spectrum to the next: 10 ms."""

ROW = 2 * HOP
"""Samples a row: 20 ms, since the second convolution takes every other frame."""

# A config doesn't know which module it belongs to, so its errors name the setting from there on.
_WHERE = "config"

_LIMITS: Mapping[str, int] = {
    "mels": MAX_LEARNED_ROWS,
    "width": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "heads": MAX_HEADS,
    "intermediate": MAX_WIDTH,
    "positions": MAX_ROWS,
    "stack": MAX_LEARNED_ROWS,
}

Silence = Literal["skip", "hear", "keep"]
TooLong = Literal["refuse", "cut"]


@attrs.frozen(kw_only=True)
class WhisperConfig:
    """Settings of the encoder, ``modules.<name>.config``; by default those of Whisper tiny.

    Args:
        mels: bands of the spectrum, 80 or since large-v3 128.
        width: width of a row inside the encoder, a multiple of 2 and of ``heads``.
        layers: number of layers.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        positions: rows of the window, 20 ms each; no clip may be longer.
        dropout: the rate at which features are dropped in training of rows that enter the first layer, and of what
            attention and the feed-forward part add to rows.
        activation_dropout: likewise behind the activation of the feed-forward part.
        silence: what becomes of the rest of the window behind a clip: ``skip`` leaves it out; with ``hear`` the clip's
            rows attend to it, as the published models were trained; with ``keep`` its rows are delivered besides.
        too_long: of a clip longer than the window ``cut`` takes the beginning; ``refuse`` ends the run.
        stack: rows of 20 ms that become one for the projector, a divisor of ``positions``.
        projector: what brings the rows to the width of the language model.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    mels: int = attrs.field(default=80, validator=at_least(1, where=_WHERE))
    width: int = attrs.field(default=384, validator=at_least(4, where=_WHERE))
    layers: int = attrs.field(default=4, validator=at_least(1, where=_WHERE))
    heads: int = attrs.field(default=6, validator=at_least(1, where=_WHERE))
    intermediate: int = attrs.field(default=1536, validator=at_least(1, where=_WHERE))
    positions: int = attrs.field(default=1500, validator=at_least(1, where=_WHERE))
    dropout: float = attrs.field(default=0.0, validator=is_rate(where=_WHERE))
    activation_dropout: float = attrs.field(default=0.0, validator=is_rate(where=_WHERE))
    silence: Silence = "skip"
    too_long: TooLong = "refuse"
    stack: int = attrs.field(default=1, validator=at_least(1, where=_WHERE))
    projector: ProjectorConfig = attrs.field(factory=ProjectorConfig)

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=_WHERE)
        if self.width % 2 or self.width % self.heads:
            raise ConfigError(
                f"{_WHERE}.width",
                expected=f"a multiple of {self.heads} heads, and of 2 for sines and cosines",
                got=repr(self.width),
            )
        for name, known in (("silence", Silence), ("too_long", TooLong)):
            value = self.silence if name == "silence" else self.too_long
            if value not in get_args(known):
                allowed = " or ".join(repr(one) for one in get_args(known))
                raise ConfigError(f"{_WHERE}.{name}", expected=allowed, got=repr(value))
        if self.positions % self.stack:
            raise ConfigError(
                f"{_WHERE}.stack", expected=f"a divisor of positions = {self.positions}", got=repr(self.stack)
            )
        if self.projector.shuffle != 1:
            raise ConfigError(
                f"{_WHERE}.projector.shuffle",
                expected="1, since a clip has no squares of rows",
                got=repr(self.projector.shuffle),
                fix=f"Join rows by {_WHERE}.stack.",
            )

    @property
    def window(self) -> int:
        """Samples of the longest clip."""
        return self.positions * ROW


def samples_of(config: WhisperConfig, size: tuple[int, ...]) -> int:
    """Return how many samples of a clip of ``size`` = (frames, frames a second) the encoder hears, at least one.

    Raises:
        ValueError: it has none, or more than the window.
    """
    frames, rate = size
    if frames < 1 or rate < 1:
        msg = f"{frames} frames at {rate} a second are no clip"
        raise ValueError(msg)
    samples = max(1, (2 * frames * RATE + rate) // (2 * rate))  # rounded, as soxr rounds
    if samples > config.window and config.too_long == "refuse":
        msg = (
            f"it takes {frames / rate:.2f} s, more than the {config.window / RATE:.2f} s that the encoder hears; "
            f"split it, or set {_WHERE}.too_long = 'cut' to lose its end"
        )
        raise ValueError(msg)
    return min(samples, config.window)


def own_rows(config: WhisperConfig, size: tuple[int, ...]) -> int:
    """Return the rows inside the encoder that a clip takes itself: a multiple of ``stack``, begun ones included."""
    return -(-samples_of(config, size) // (ROW * config.stack)) * config.stack


def encoded_rows(config: WhisperConfig, size: tuple[int, ...]) -> int:
    """Return the rows inside the encoder that are computed for a clip."""
    own = own_rows(config, size)
    return own if config.silence == "skip" else config.positions


def stacked_rows(config: WhisperConfig, size: tuple[int, ...]) -> int:
    """Return the rows that the projector gets of a clip."""
    own = own_rows(config, size)
    return (config.positions if config.silence == "keep" else own) // config.stack


def delivered_rows(config: WhisperConfig, size: tuple[int, ...]) -> int:
    """Return the rows that the language model gets of a clip."""
    return projected_rows(config.projector, (stacked_rows(config, size), 1))
