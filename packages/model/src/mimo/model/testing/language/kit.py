"""All checks of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mimo.model.spec import LanguageModelSpec
from mimo.model.testing import modules
from mimo.model.testing.checks import Check, Checks, Verdict, assert_kept
from mimo.model.testing.language import cache_checks, layout_checks, row_checks, spec_checks
from mimo.model.testing.language.layouts import subject_of

LANGUAGE_CHECKS: Mapping[str, Check] = {
    "build": Check(spec_checks.check_build),
    "names": Check(spec_checks.check_names),
    "layers": Check(spec_checks.check_layers),
    "rows": Check(row_checks.check_rows),
    "empty": Check(row_checks.check_empty),
    "vocabulary": Check(row_checks.check_vocabulary),
    "independence": Check(row_checks.check_alone),
    "causality": Check(row_checks.check_causal),
    "labels": Check(row_checks.check_labels),
    "placeholders": Check(row_checks.check_placeholders),
    "state": Check(row_checks.check_state),
    "chance": Check(modules.check_chance),
    "gradients": Check(modules.check_gradients),
    "lanes": Check(row_checks.check_lanes),
    "auxiliary losses": Check(row_checks.check_aux_losses),
    "initial values": Check(modules.check_initial),
    "save and load": Check(modules.check_saved),
    "number types": Check(row_checks.check_types),
    "parts": Check(spec_checks.check_parts),
    "costs": Check(spec_checks.check_costs),
    "published weights": Check(modules.check_published),
    "decode cache": Check(cache_checks.check_cache),
    "stages": Check(layout_checks.check_stages),
    "recompute": Check(layout_checks.check_recompute),
    "deferred gradients": Check(layout_checks.check_deferred),
    "tensor ranks": Check(layout_checks.check_tensor, layout_checks.RANKS),
    "sequence parallel": Check(layout_checks.check_sequence, layout_checks.RANKS),
    "context ranks": Check(layout_checks.check_context, layout_checks.RANKS),
    "expert ranks": Check(layout_checks.check_experts, layout_checks.RANKS),
}
"""What is checked, by its short name, in the order in which a beginner should mend it."""

_NEEDED = frozenset({"build", "names", "rows", "empty"})
"""What all other checks rely on."""


def check_language_model(
    spec: LanguageModelSpec,
    *,
    config: Any = None,
    checks: Iterable[str] = LANGUAGE_CHECKS,
    seconds: float = 300,
) -> Iterator[Verdict]:
    """Look whether a language model keeps its promises, and yield a verdict on each.

    Each check runs in forked processes of its own; this process computes nothing with torch.

    Args:
        spec: the language model.
        config: settings, small ones; the defaults if None. A vocabulary of 0 becomes a small one.
        checks: names of the `LANGUAGE_CHECKS` to run.
        seconds: how long a check may take.
    """
    return Checks(by_name=LANGUAGE_CHECKS, needed=_NEEDED).look(subject_of(spec, config), checks, seconds=seconds)


def assert_language_model_conforms(
    spec: LanguageModelSpec,
    *,
    config: Any = None,
    checks: Iterable[str] = LANGUAGE_CHECKS,
    seconds: float = 300,
) -> None:
    """Fail with all verdicts if a language model breaks a promise; arguments as for `check_language_model`.

    Raises:
        AssertionError: its text is a line for each check.
    """
    verdicts = check_language_model(spec, config=config, checks=checks, seconds=seconds)
    assert_kept(f"language model {spec.name!r}", verdicts)
