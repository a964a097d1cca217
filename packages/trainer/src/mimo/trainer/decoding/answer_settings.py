"""How answers of held-out samples are generated and scored. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mimo.data import ANSWER_METRICS, AnswerMetricSpec
from mimo.hooks import ConfigError
from mimo.trainer.config.plugin_kinds import find_installed


@attrs.frozen(kw_only=True)
class AnswerSettings:
    """How answers are generated and scored.

    Args:
        metrics: names of installed ones.
        max_tokens: largest number of tokens to generate for each.
        batch: how many are generated at once.
    """

    metrics: Sequence[str] = ()
    max_tokens: int = 64
    batch: int = 8

    def __attrs_post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("--max-tokens", self.max_tokens), ("--batch", self.batch)):
            if value < 1:
                raise ConfigError(name, expected="1 or more", got=repr(value))

    def specs(self) -> list[AnswerMetricSpec]:
        """Return the metrics.

        Raises:
            ConfigError: one is not installed.
        """
        return [find_installed(ANSWER_METRICS, name, "--answers") for name in dict.fromkeys(self.metrics)]
