"""Validators refuse a setting by its path."""

from __future__ import annotations

import math

import attrs
import pytest

from mimo.hooks import ConfigError, Validator, above_zero, at_least, at_most, check_at_most, from_zero, is_rate, must_be

HUGE = 1 << 20_000
"""A number of more digits than Python writes."""


@pytest.mark.parametrize(
    ("validator", "allowed", "refused", "expected"),
    [
        (at_least(1, where="data"), [1, 2, math.inf], [0, -1, math.nan], "1 or more"),
        (at_most(3, where="data"), [3, -math.inf], [4, math.nan, HUGE], "at most 3"),
        (is_rate(where="data"), [0, 0.5], [-0.5, 1, math.nan], "a rate of 0 or more and less than 1"),
        (from_zero(where="data"), [0, 0.5], [-0.5, math.inf, math.nan], "a finite number of 0 or more"),
        (above_zero(where="data"), [1e-300, 7], [0, -1, math.inf, math.nan], "a finite number above 0"),
        (must_be("an even number", lambda value: value % 2 == 0, where="data"), [2], [1], "an even number"),
    ],
)
def test_validators(validator: Validator, allowed: list[float], refused: list[float], expected: str) -> None:
    """What is allowed is kept, and the error has the path, what was expected and what was got."""

    @attrs.frozen
    class Config:
        share: float = attrs.field(validator=validator)

    for value in allowed:
        assert Config(value).share == value
    for value in refused:
        got = "a number of 20001 bits" if value is HUGE else repr(value)
        with pytest.raises(ConfigError) as caught:
            Config(value)
        assert str(caught.value) == f"data.share: expected {expected}, got {got}."


def test_a_validator_without_a_path_names_the_field_alone() -> None:
    """Whoever structures the table knows its path."""

    @attrs.frozen
    class Config:
        count: int = attrs.field(validator=at_least(1))

    with pytest.raises(ConfigError, match=r"^count: expected 1 or more, got 0\.$"):
        Config(0)


def test_limits_of_several_fields() -> None:
    """The first number that is too large is named."""

    @attrs.frozen
    class Config:
        height: int
        width: int

    check_at_most(Config(3, 4), {"height": 3, "width": 4}, where="data")
    with pytest.raises(ConfigError, match=r"^data\.width: expected at most 4, got 5\.$"):
        check_at_most(Config(3, 5), {"height": 3, "width": 4}, where="data")
    with pytest.raises(ConfigError, match=r"^data\.height: expected at most 3, got a number of 20001 bits\.$"):
        check_at_most(Config(HUGE, 5), {"height": 3, "width": 4}, where="data")
