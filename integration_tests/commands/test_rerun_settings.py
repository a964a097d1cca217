"""What the settings of the rerun machine allow, and what of them would do nothing and is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.trainer import read_settings, resolve
from mimo.trainer.runtime import EXAMPLE

INJECT = {"step": 3, "module": "vision", "rank": 1}


def check(rerun: dict[str, Any], **vision: Any) -> None:
    """Resolve the example with these settings."""
    modules = {**EXAMPLE["modules"], "vision": {**EXAMPLE["modules"]["vision"], **vision}}
    resolve(read_settings({**EXAMPLE, "modules": modules, "rerun": rerun}))


@pytest.mark.parametrize(
    "rerun",
    [
        {},
        {"skip_steps": [3, 400]},
        {"mode": "validate", "spike_factor": 0, "tolerance": 1e-3, "device": ["a", "b", "c", "d"]},
        {"mode": "validate", "spike_steps": 5, "device": "a", "inject": INJECT},
        {"mode": "validate", "spike_factor": 0, "spike_steps": 5, "pass_factor": 1000},
        {"mode": "report_determinism", "device": "a"},
    ],
)
def test_what_is_used_is_allowed(rerun: dict[str, Any]) -> None:
    """Each mode has its own settings."""
    check(rerun)


@pytest.mark.parametrize(
    ("rerun", "text"),
    [
        ({"mode": "validated"}, "rerun.mode: expected one of 'disabled', 'validate', 'report_determinism'"),
        (
            {"spike_factor": 5},
            "rerun.spike_factor: expected nothing, as rerun.mode is 'disabled', got 5.0. Leave it out, ",
        ),
        ({"device": "a"}, "rerun.device: expected nothing, as rerun.mode is 'disabled', got 'a'."),
        (
            {"mode": "report_determinism", "tolerance": 0.1},
            "rerun.tolerance: expected nothing, as rerun.mode is 'report_",
        ),
        (
            {"mode": "validate", "spike_factor": 0, "pass_factor": 0, "spike_steps": 5},
            "rerun.spike_steps: expected nothing, as rerun.spike_factor and rerun.pass_factor are 0, got 5. Leave it",
        ),
        (
            {"mode": "validate", "spike_factor": -1},
            "rerun.spike_factor: expected a finite number of 0 or more, got -1.0",
        ),
        (
            {"mode": "validate", "pass_factor": math.inf},
            "rerun.pass_factor: expected a finite number of 0 or more, got inf",
        ),
        ({"pass_factor": 9}, "rerun.pass_factor: expected nothing, as rerun.mode is 'disabled', got 9.0. Leave it out"),
        ({"skip_steps": [401]}, "rerun.skip_steps: expected steps from 1 to run.steps = 400, got 401."),
        (
            {"mode": "validate", "device": ["a"]},
            "rerun.device: expected one text, or one for each of the 4 ranks, got 1 ",
        ),
        ({"inject": INJECT}, "rerun.inject.step: expected nothing, as rerun.mode is 'disabled', which judges no step"),
        ({"mode": "validate", "inject": {"rank": 1}}, "rerun.inject.rank: expected nothing, as rerun.inject.step is 0"),
        (
            {"mode": "validate", "inject": {**INJECT, "module": "audio"}},
            "rerun.inject.module: expected one of vision, language, got 'audio'.",
        ),
        ({"mode": "validate", "inject": {**INJECT, "rank": 2}}, "rerun.inject.rank: expected one of 0-1, got 2."),
        (
            {"mode": "validate", "inject": {**INJECT, "microbatch": 4}},
            "rerun.inject.microbatch: expected one of 0-3, got 4.",
        ),
        ({"mode": "validate", "inject": {**INJECT, "step": 401}}, "rerun.inject.step: expected one of 1-400, got 401."),
    ],
)
def test_what_would_do_nothing_is_refused(rerun: dict[str, Any], text: str) -> None:
    """By its path, with what is expected instead."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        check(rerun)


def test_a_gradient_that_nobody_computes_cannot_be_corrupted() -> None:
    """A frozen encoder runs no backward."""
    text = re.escape("rerun.inject.what: expected 'forward', as vision runs no backward, got 'gradient'.")
    with pytest.raises(ConfigError, match=text):
        check({"mode": "validate", "inject": {**INJECT, "what": "gradient"}}, frozen=True)
