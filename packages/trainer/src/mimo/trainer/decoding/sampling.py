"""How the next token is chosen: the settings, by the names that `transformers` has for them. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from mimo.hooks import ConfigError


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
    """How a token is chosen; the probabilities are those of the logits processors of `transformers`, in its order.

    Args:
        temperature: divides the logits before one is drawn; 0 for the likeliest, of equal ones the lowest id.
        top_k: draws among so many of the likeliest alone, and those equal to the last of them; 0 for all.
        top_p: of these, of as few of the likeliest as together have this share of their probability
            (Holtzman et al. 2019, arXiv:1904.09751, section 3.1); 1 for all.
        min_p: of these, of those at least this share as likely as the likeliest (Nguyen et al. 2024,
            arXiv:2407.01082); 0 for all.
        repetition_penalty: before all else, divides the positive logits of ids that the prompt or what was generated
            has, and multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858, section 4.1); 1 for none.
        seed: of the draws.

    Raises:
        ConfigError: a value is out of range, or says how to draw where nothing is drawn.
    """

    temperature: float = attrs.field(
        default=0.0, validator=_checked("a number from 0", lambda value: math.isfinite(value) and value >= 0)
    )
    top_k: int = attrs.field(default=0, validator=_checked("0 or more", lambda value: value >= 0))
    top_p: float = attrs.field(default=1.0, validator=_checked("a number above 0, to 1", lambda value: 0 < value <= 1))
    min_p: float = attrs.field(default=0.0, validator=_checked("a number from 0 to 1", lambda value: 0 <= value <= 1))
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_checked("a number above 0", lambda value: math.isfinite(value) and value > 0)
    )
    seed: int = attrs.field(default=0, validator=_checked("0 or more", lambda value: value >= 0))

    def __attrs_post_init__(self) -> None:
        """Check one against another."""
        for name, says in (("top-k", self.top_k != 0), ("top-p", self.top_p != 1), ("min-p", self.min_p != 0)):
            if says and self.temperature == 0:
                raise nothing_drawn(f"--{name}")
