"""Metrics of answers: equal, equal but for what readers pass over, and contained."""

from __future__ import annotations

import pytest

from mimo.data import ANSWER_METRICS
from mimo.hooks import discover


@pytest.mark.parametrize(
    ("answer", "reference", "scores"),
    [
        ("A zebra.", "A zebra.", (1, 1, 1)),
        ("the  ZEBRA", "A zebra.", (0, 1, 1)),
        ("It is a zebra, I think.", "A zebra.", (0, 0, 1)),
        ("zebras", "zebra", (0, 0, 0)),
        ("", "zebra", (0, 0, 0)),
        ("another", "other", (0, 0, 0)),
        ("!", "?", (0, 1, 1)),
        ("x", "?", (0, 0, 0)),
        ("theatre", "atre", (0, 0, 0)),
    ],
)
def test_answers_are_compared(answer: str, reference: str, scores: tuple[float, ...]) -> None:
    """Case, punctuation, articles and white space count for the first metric alone, and words are whole."""
    found = discover(ANSWER_METRICS)
    assert (
        tuple(found.find(name, "").score(answer, reference) for name in ("exact", "normalised", "contains")) == scores
    )
