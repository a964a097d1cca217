"""Errors: one form of text, and the exit code of the process that each ends."""

from __future__ import annotations

import pytest

from mimo.hooks import CheckpointError, ConfigError, DataError, PlanError, PluginError, RunError, UserError


def test_hooks_errors_say_place_expectation_finding_and_next_step() -> None:
    """The text has a fixed form, and the parts stay readable as fields."""
    error = ConfigError("modules.vision.tp", expected="a divisor of heads = 6", got="4", fix="Set it to 1, 2, 3 or 6.")
    assert str(error) == "modules.vision.tp: expected a divisor of heads = 6, got 4. Set it to 1, 2, 3 or 6."
    assert (error.where, error.expected, error.got) == ("modules.vision.tp", "a divisor of heads = 6", "4")
    assert error.fix == "Set it to 1, 2, 3 or 6."


def test_hooks_errors_may_know_no_next_step() -> None:
    """Without a next step the text ends after the finding."""
    assert str(DataError("train.jsonl:12", expected="2 images", got="1")) == "train.jsonl:12: expected 2 images, got 1."


def test_hooks_errors_may_list_lines() -> None:
    """After lines the next step has one of its own, without a full stop before it."""
    error = ConfigError("a", expected="b", got="2 that differ:\n  c\n  d\n", fix="Mend both.")
    assert str(error) == "a: expected b, got 2 that differ:\n  c\n  d\nMend both."


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (PluginError, 2), (PlanError, 2), (DataError, 3), (CheckpointError, 3), (RunError, 3)],
)
def test_hooks_errors_know_their_exit_code(kind: type[UserError], code: int) -> None:
    """What is refused before launch ends with 2, what fails at run time with 3; all are value errors."""
    error = kind("a", expected="b", got="c")
    assert error.exit_code == code
    assert isinstance(error, ValueError)


def test_hooks_errors_of_plugins_can_be_seen_from_a_setting() -> None:
    """The setting's path comes first, the rest stays."""
    error = PluginError("plugin 'b'", expected="a list", got="None", fix="Correct it.").seen_from(
        "modules.vision.plugin"
    )
    assert str(error) == "modules.vision.plugin: plugin 'b': expected a list, got None. Correct it."
