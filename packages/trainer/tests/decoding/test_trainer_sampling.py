"""Which token comes next: the likeliest or a drawn one, among those that may be drawn, by seed and place alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mimo.hooks import ConfigError, RunError
from mimo.trainer.decoding.sampling import Sampling

SHARES = (0.1, 0.4, 0.0, 0.2, 0.05, 0.25)
"""Probabilities of six ids at temperature 1, of sum 1."""
DRAWS = 4000


def logits(shares: tuple[float, ...] = SHARES) -> Any:
    """Return logits that give these probabilities, shifted as a model's may be."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(shares)) - 3).astype(np.float32)


def drawn(**keys: Any) -> dict[int, float]:
    """Return how often each id is drawn, as shares."""
    sampling = Sampling(**{"temperature": 1.0, "seed": 5, **keys})
    counts = Counter(sampling.choose(logits(), position) for position in range(DRAWS))
    return {token: count / DRAWS for token, count in sorted(counts.items())}


def shares_of(*kept: int, power: float = 1.0) -> dict[int, Any]:
    """Return the shares that some ids have among themselves, nearly as they must be drawn."""
    weights = {token: SHARES[token] ** power for token in kept}
    return {token: pytest.approx(weight / sum(weights.values()), abs=0.03) for token, weight in weights.items()}


def test_without_a_temperature_the_likeliest_comes() -> None:
    """Of equal ones the lowest."""
    assert Sampling().choose(logits(), 0) == 1
    assert Sampling(seed=7).choose(np.array([0, 2, 1, 2], dtype=np.float32), 9) == 1


@pytest.mark.parametrize(
    ("keys", "kept", "power"),
    [
        ({}, (0, 1, 3, 4, 5), 1),
        ({"temperature": 0.5}, (0, 1, 3, 4, 5), 2),
        ({"top_k": 3}, (1, 3, 5), 1),
        ({"top_k": 1}, (1,), 1),
        ({"top_p": 0.6}, (1, 5), 1),
        ({"top_p": 0.7}, (1, 3, 5), 1),
        ({"top_p": 0.01}, (1,), 1),
        ({"top_k": 2, "top_p": 0.6}, (1,), 1),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(keys: dict[str, Any], kept: tuple[int, ...], power: float) -> None:
    """By their probability among those that may be drawn; what has none never comes."""
    assert drawn(**keys) == shares_of(*kept, power=power)


def test_a_draw_follows_from_seed_and_place() -> None:
    """Not from what was drawn before; other seeds and places draw otherwise."""
    one = [Sampling(temperature=1, seed=1).choose(logits(), position) for position in range(40)]
    again = [Sampling(temperature=1, seed=1).choose(logits(), position) for position in reversed(range(40))]
    assert one == again[::-1]
    assert one != [Sampling(temperature=1, seed=2).choose(logits(), position) for position in range(40)]
    assert one[:6] == [0, 5, 1, 5, 1, 1]


def test_a_low_temperature_is_the_likeliest() -> None:
    """However low."""
    assert {Sampling(temperature=1e-300, seed=seed).choose(logits(), 0) for seed in range(9)} == {1}


def test_a_rounding_changes_no_draw() -> None:
    """As another layout may round; and where two ids have nearly the same logit their order does not matter."""
    rng = np.random.default_rng(0)
    for keys in ({}, {"top_p": 0.9}, {"top_k": 7}):
        sampling = Sampling(temperature=0.8, seed=3, **keys)
        for position in range(50):
            given = rng.normal(size=20).astype(np.float32)
            given[4] = given[5]
            other = given * np.float32(1 + 1e-6)
            assert sampling.choose(given, position) == sampling.choose(other, position)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    """Instead of a token that means nothing."""
    given = np.full(4, wrong, dtype=np.float32)
    with pytest.raises(RunError, match=r"modules\.language: expected finite logits, got .* at position 6\."):
        Sampling(temperature=temperature).choose(given, 6)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"temperature": -0.5}, r"--temperature: expected a number from 0, got -0\.5"),
        ({"temperature": float("nan")}, "--temperature: expected a number from 0, got nan"),
        ({"top_p": 0.0}, r"--top-p: expected a number above 0, to 1, got 0\.0"),
        ({"top_p": 1.5}, "--top-p: expected a number above 0, to 1"),
        ({"top_k": -1}, "--top-k: expected 0 or more, got -1"),
        ({"seed": -1}, "--seed: expected 0 or more, got -1"),
        ({"top_p": 0.9}, r"--top-p: expected a --temperature above 0 beside it, got 0, with which nothing is drawn\. "),
        ({"top_k": 2}, "--top-k: expected a --temperature above 0 beside it"),
    ],
    ids=str,
)
def test_a_choice_out_of_range_is_refused(keys: dict[str, Any], text: str) -> None:
    """By the option's name; so is one that would change nothing."""
    with pytest.raises(ConfigError, match=text):
        Sampling(**keys)
