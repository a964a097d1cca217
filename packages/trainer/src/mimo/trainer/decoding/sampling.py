"""Sampling of the next token from the logits: the likeliest, or one drawn. Free of torch.

A draw depends on the seed and the token's place in its sample alone, not on who draws it or what was drawn before.
Shapes: V ids of the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.hooks import ConfigError, RunError

_UNIT = 2.0**-53


def _checked(expected: str, holds: Callable[[float], bool]) -> Callable[[Sampling, attrs.Attribute[Any], Any], None]:
    def check(_: Sampling, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"--{attribute.name.replace('_', '-')}", expected=expected, got=repr(value))

    return check


def nothing_drawn(option: str) -> ConfigError:
    """Return the error of an option for drawing where the likeliest token is taken."""
    return ConfigError(
        option,
        expected="a --temperature above 0 beside it",
        got="0, with which nothing is drawn",
        fix="Give one, such as --temperature 1, or leave this out.",
    )


@attrs.frozen(kw_only=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: divides the logits before one is drawn; 0 for the likeliest, of equal ones the lowest id.
        top_k: draws among so many of the likeliest alone; 0 for all.
        top_p: of these, of as few of the likeliest as together have this share of their probability
            (Holtzman et al. 2019, arXiv:1904.09751, section 3.1); 1 for all.
        seed: of the draws.

    Raises:
        ConfigError: a value is out of range, or says how to draw where nothing is drawn.
    """

    temperature: float = attrs.field(
        default=0.0, validator=_checked("a number from 0", lambda value: math.isfinite(value) and value >= 0)
    )
    top_k: int = attrs.field(default=0, validator=_checked("0 or more", lambda value: value >= 0))
    top_p: float = attrs.field(default=1.0, validator=_checked("a number above 0, to 1", lambda value: 0 < value <= 1))
    seed: int = attrs.field(default=0, validator=_checked("0 or more", lambda value: value >= 0))

    def __attrs_post_init__(self) -> None:
        """Check one against another."""
        for name, says in (("top-k", self.top_k != 0), ("top-p", self.top_p != 1)):
            if says and self.temperature == 0:
                raise nothing_drawn(f"--{name}")

    def choose(self, logits: NDArray[np.float32], position: int) -> int:
        """Return the id to stand at ``position`` of the sample, of logits [V].

        Raises:
            RunError: no logit is the largest, since one is not a number, or infinite.
        """
        top = logits.max()
        if not np.isfinite(top):
            raise RunError(
                "modules.language",
                expected="finite logits",
                got=f"{top} among those of the token at position {position}",
                fix="The weights, or what the prompt makes of them, are no numbers: try an earlier checkpoint.",
            )
        if self.temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logits.astype(np.float64) - float(top)) / self.temperature)  # [V]
        candidates = self._candidates(weights)
        # By id and not by size: where two are nearly equal, a rounding must not exchange their places.
        sums = weights[candidates].cumsum()
        bits = np.random.Philox(np.random.SeedSequence([self.seed, position])).random_raw() >> 11
        place = int(np.searchsorted(sums, bits * _UNIT * sums[-1], side="right"))
        return int(candidates[min(place, len(candidates) - 1)])

    def _candidates(self, weights: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the ids that may be drawn, ascending."""
        if self.top_k == 0 and self.top_p == 1:
            return np.arange(len(weights))
        order = np.argsort(-weights, kind="stable")[: self.top_k or None]
        if self.top_p < 1:
            sums = weights[order].cumsum()
            order = order[: int(np.searchsorted(sums, self.top_p * sums[-1])) + 1]
        return np.sort(order)
