"""Which token comes next: the likeliest or a drawn one, by the probabilities of `transformers`, by seed and place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from mimo.hooks import ConfigError, RunError
from mimo.trainer.decoding.choosing import choose, penalised, probabilities
from mimo.trainer.decoding.sampling import Sampling

SHARES = (0.1, 0.4, 0.0, 0.2, 0.05, 0.25)
"""Probabilities of six ids at temperature 1, of sum 1."""
DRAWS = 4000


def logits(shares: tuple[float, ...] = SHARES) -> Tensor:
    """Return logits [V] that give these probabilities, shifted as a model's may be."""
    return torch.tensor(shares, dtype=torch.float64).log().float() - 3


def chosen(sampling: Sampling, given: Tensor, place: int, prompt: int = 0) -> int:
    """Return the token that is chosen of logits [V], at a place of a sequence by itself."""
    (token,) = choose(sampling, given.unsqueeze(0), [[0] * place], [prompt])
    return token


def drawn(**keys: Any) -> dict[int, float]:
    """Return how often each id is drawn, as shares."""
    sampling = Sampling(**{"temperature": 1.0, "seed": 5, **keys})
    counts = Counter(choose(sampling, logits().repeat(DRAWS, 1), [range(place) for place in range(DRAWS)], [0] * DRAWS))
    return {token: count / DRAWS for token, count in sorted(counts.items())}


def shares_of(*kept: int, power: float = 1.0) -> dict[int, Any]:
    """Return the shares that some ids have among themselves, nearly as they must be drawn."""
    weights = {token: SHARES[token] ** power for token in kept}
    return {token: pytest.approx(weight / sum(weights.values()), abs=0.03) for token, weight in weights.items()}


def test_without_a_temperature_the_likeliest_comes() -> None:
    """Of equal ones the lowest."""
    assert chosen(Sampling(), logits(), 0) == 1
    assert chosen(Sampling(seed=7), torch.tensor([0.0, 2, 1, 2]), 9) == 1


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
        ({"min_p": 0.4}, (1, 3, 5), 1),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(keys: dict[str, Any], kept: tuple[int, ...], power: float) -> None:
    """By their probability among those that may be drawn; what has none never comes."""
    assert drawn(**keys) == shares_of(*kept, power=power)


def test_a_draw_follows_from_seed_and_place() -> None:
    """Not from what was drawn before; other seeds and places draw otherwise."""
    one = [chosen(Sampling(temperature=1, seed=1), logits(), position) for position in range(40)]
    again = [chosen(Sampling(temperature=1, seed=1), logits(), position) for position in reversed(range(40))]
    assert one == again[::-1]
    assert one != [chosen(Sampling(temperature=1, seed=2), logits(), position) for position in range(40)]
    assert one[:6] == [0, 1, 5, 5, 3, 1]


def test_a_low_temperature_is_the_likeliest() -> None:
    """However low."""
    assert {chosen(Sampling(temperature=1e-300, seed=seed), logits(), 0) for seed in range(9)} == {1}


def test_a_rounding_changes_no_draw() -> None:
    """As another layout may round; and where two ids have nearly the same logit their order does not matter."""
    rng = np.random.default_rng(0)
    for keys in ({}, {"top_p": 0.9}, {"top_k": 7}):
        sampling = Sampling(temperature=0.8, seed=3, **keys)
        for position in range(50):
            given = torch.from_numpy(rng.normal(size=20)).float()
            given[4] = given[5]
            assert chosen(sampling, given, position) == chosen(sampling, given * (1 + 1e-6), position)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    """Instead of a token that means nothing."""
    given = torch.full((4,), wrong)
    with pytest.raises(RunError, match=r"modules\.language: expected finite logits, got .* at position 6\."):
        chosen(Sampling(temperature=temperature), given, 6)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"temperature": -0.5}, r"--temperature: expected a number from 0, got -0\.5"),
        ({"temperature": float("nan")}, "--temperature: expected a number from 0, got nan"),
        ({"top_p": 0.0}, r"--top-p: expected a number above 0, to 1, got 0\.0"),
        ({"top_p": 1.5}, "--top-p: expected a number above 0, to 1"),
        ({"min_p": 1.5}, r"--min-p: expected a number from 0 to 1, got 1\.5"),
        ({"min_p": -0.1}, r"--min-p: expected a number from 0 to 1, got -0\.1"),
        ({"repetition_penalty": 0.0}, r"--repetition-penalty: expected a number above 0, got 0\.0"),
        ({"repetition_penalty": float("inf")}, "--repetition-penalty: expected a number above 0, got inf"),
        ({"min_p": 0.2}, "--min-p: expected a --temperature above 0 beside it"),
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


GIVEN: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
}
"""A value of each setting that changes probabilities."""


def theirs(keys: dict[str, Any], given: Tensor, seen: Tensor) -> Tensor:
    """Return the probabilities [B, V] of `transformers`, its processors applied in the order of its `generate`."""
    kinds: dict[str, Any] = {
        "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
    }
    scores = given
    for name, kind in kinds.items():
        if name in keys:
            scores = kind(keys[name])(seen, scores)
    return scores.softmax(1)


def ours(keys: dict[str, Any], given: Tensor, seen: Tensor) -> Tensor:
    """Return the probabilities [B, V] by which we draw."""
    sampling = Sampling(**{"temperature": 1.0, **keys})
    return probabilities(sampling, penalised(given, seen.tolist(), sampling.repetition_penalty))


@pytest.mark.parametrize("kind", ["distinct", "ties", "equal"])
@pytest.mark.parametrize("names", [*((name,) for name in GIVEN), ("top_k", "top_p"), tuple(GIVEN)], ids=" ".join)
def test_probabilities_are_those_of_transformers(names: tuple[str, ...], kind: str) -> None:
    """Bit for bit, of logits that are all different, of few values, and all equal, where a cut goes through ties."""
    generator = torch.Generator().manual_seed(3)
    seen = torch.randint(32, (6, 9), generator=generator)  # some are beyond the ids that have a logit
    for scale in (0.5, 3.0, 20.0):
        given = torch.randn(6, 30, generator=generator) * scale
        given = {"distinct": given, "ties": given.round() * scale, "equal": torch.full_like(given, scale)}[kind]
        for factor in (1.0, 0.4, 0.15):
            keys = {name: value * factor if name in ("top_p", "min_p") else value for name, value in GIVEN.items()}
            keys = {name: keys[name] for name in names}
            assert ours(keys, given, seen).equal(theirs(keys, given, seen)), (keys, scale)


def test_a_penalty_changes_the_likeliest_too() -> None:
    """What was seen is less likely, whether its logit is above or below zero."""
    given = torch.tensor([[1.0, 0.9, -2.0], [-1.0, -1.1, -2.0]])
    assert choose(Sampling(), given, [[0], [0]]) == [0, 0]
    assert choose(Sampling(repetition_penalty=1.2), given, [[0], [0]]) == [1, 1]


def test_draws_of_a_prompt_know_nothing_of_the_others() -> None:
    """Its number and the place count, not its row or what stands beside it; other numbers draw otherwise."""
    sampling = Sampling(temperature=1, top_p=0.9, min_p=0.01, seed=1)
    given = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    seen, prompts = [[0] * count for count in (3, 4, 3, 9, 1)], [7, 2, 1, 4, 0]
    together = choose(sampling, given, seen, prompts)
    order = [3, 0, 4, 1, 2]
    turned = choose(sampling, given[order], [seen[i] for i in order], [prompts[i] for i in order])
    assert turned == [together[i] for i in order]
    assert together == [chosen(sampling, given[i], len(seen[i]), prompts[i]) for i in range(5)]
    same = [chosen(sampling, given[0], 3, prompt) for prompt in range(12)]
    assert len(set(same)) > 3
