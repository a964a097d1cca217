"""``mimo evaluate``: evaluate a checkpoint on held-out samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mimo.hooks import ConfigError


def evaluate(
    checkpoint: Path,
    /,
    *overrides: str,
    answers: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    max_tokens: Annotated[int | None, Parameter(show_default=False)] = None,
    batch: Annotated[int | None, Parameter(show_default=False)] = None,
) -> int:
    """Evaluate a checkpoint on the held-out samples, in one process unless ranks are overridden.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
        answers: generates the last answer of each sample too, and compares it: exact, normalised (without case,
            punctuation and articles), contains, or a plugin's metric; may be given several times.
        max_tokens: most tokens of an answer; 64 if left out.
        batch: how many answers are generated at once; 8 if left out.
    """
    from mimo.trainer.decoding.answer_settings import AnswerSettings
    from mimo.trainer.run.start import start_evaluation

    given = {name: value for name, value in (("max_tokens", max_tokens), ("batch", batch)) if value is not None}
    if given and not answers:
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise ConfigError(name, expected="--answers METRIC beside it", got="none", fix="Leave it out.")
    return start_evaluation(checkpoint, overrides, AnswerSettings(metrics=answers, **given))
