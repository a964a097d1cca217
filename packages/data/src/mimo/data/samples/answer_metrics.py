"""The metrics of generated answers that come with this package."""

from __future__ import annotations

import re
import string

from mimo.data.samples.specs import AnswerMetricSpec
from mimo.hooks import hookimpl

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and surplus white space.

    As the evaluation of SQuAD has it (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _exact(answer: str, reference: str) -> float:
    """Tell whether the two are equal."""
    return float(answer == reference)


def _normalised(answer: str, reference: str) -> float:
    """Tell whether the two are equal when `normalised`."""
    return float(normalised(answer) == normalised(reference))


def _contains(answer: str, reference: str) -> float:
    """Tell whether the words of the reference stand in the answer, both `normalised`."""
    words = normalised(reference)
    return float(f" {words} " in f" {normalised(answer)} " if words else not normalised(answer))


@hookimpl
def mimo_register_answer_metrics() -> list[AnswerMetricSpec]:
    """Return ``exact``, ``normalised`` and ``contains``."""
    scores = {"exact": _exact, "normalised": _normalised, "contains": _contains}
    return [AnswerMetricSpec(name=name, score=score) for name, score in scores.items()]
