"""Checks of a language model split over stages, tensor, context and expert ranks, against itself whole."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.model.testing.checks import SkippedError
from mimo.model.testing.language.layouts import Comparison
from mimo.model.testing.language.subject import LANES, NAME, LanguageLayout, LanguageSubject
from mimo.model.testing.modules import refuse_layout

RANKS = 2
"""Of each axis that is split."""
_SINGLE = (LANES[:1], LANES[3:], LANES[2:3])
"""Lanes for layouts of one, a microbatch after the other: several samples, a single row, nothing."""


def check_stages(subject: LanguageSubject) -> None:
    """Stages one after the other compute what the whole does: losses, gradients, initial values."""
    _check(subject, [LanguageLayout(pp=RANKS)])


def check_recompute(subject: LanguageSubject) -> None:
    """Recomputation changes neither losses nor gradients."""
    if not subject.spec.recompute:
        raise SkippedError("the spec has no recomputation")
    _check(
        subject,
        *([LanguageLayout(recompute=kind)] for kind in subject.spec.recompute),  # type: ignore[arg-type]  # any that is there
    )


def check_deferred(subject: LanguageSubject) -> None:
    """Gradients of weights that are computed after the others, as some schedules do, are the same."""
    _check(subject, [LanguageLayout(splits_backward=True)])


def check_tensor(subject: LanguageSubject) -> None:
    """Tensor ranks compute together what one rank does: losses, gradients, initial values."""
    if subject.spec.tensor is None:
        raise SkippedError("the spec has no tensor support")
    _check(subject, [LanguageLayout(tp=RANKS, lanes=lanes) for lanes in _SINGLE])


def check_sequence(subject: LanguageSubject) -> None:
    """Tensor ranks that also split the rows between layers compute what one rank does."""
    if subject.spec.tensor is None or not subject.spec.tensor.splits_rows:
        raise SkippedError("its tensor support does not split rows")
    _check(subject, [LanguageLayout(tp=RANKS, sequence_parallel=True, lanes=lanes) for lanes in _SINGLE])


def check_context(subject: LanguageSubject) -> None:
    """Context ranks, each with a share of every sample, compute what one rank does."""
    if subject.spec.context is None:
        raise SkippedError("the spec has no context support")
    _check(subject, [LanguageLayout(cp=RANKS, lanes=lanes) for lanes in _SINGLE])


def check_experts(subject: LanguageSubject) -> None:
    """Experts spread over lanes, one of them empty, or cut over lanes, compute what one rank does."""
    if subject.spec.experts is None:
        raise SkippedError("the spec has no expert support")
    if not subject.spec.experts.count(subject.config):
        raise SkippedError("there are none with these settings")
    over_lanes = [LanguageLayout(ep=RANKS, lanes=lanes) for lanes in (LANES[:2], LANES[1:3])]
    _check(subject, over_lanes, [LanguageLayout(etp=RANKS, lanes=LANES[:2])])


def _check(subject: LanguageSubject, *steps: Sequence[LanguageLayout]) -> None:
    """Compare layouts with the whole module; those of a step are the same but for the tokens of their lanes."""
    comparison = Comparison(subject=subject)
    for layouts in steps:
        refuse_layout(subject, NAME, layouts[0])
        comparison.check(*layouts)
