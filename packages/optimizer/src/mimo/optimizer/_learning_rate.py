"""The learning rate of each step: warm-up, then constant, linear or cosine decay. A pure function of the step."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import attrs

from mimo.hooks import ConfigError, check_at_most

Schedule = Literal["constant", "linear", "cosine"]
MAX_LR = 1e3
"""Above it any optimizer diverges at once."""
MAX_STEPS = 10**12
_STEPS = ("lr_warmup_steps", "lr_stable_steps", "lr_decay_steps")
FALLING = ("lr_stable_steps", "lr_decay_steps", "lr_min")
"""What a schedule has that falls, and a constant one has not."""


def _at_least_zero(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0 or math.isinf(value):
        raise ConfigError(
            f"{instance.where}.{attribute.name}", expected="a finite number of 0 or more", got=repr(value)
        )


@attrs.frozen(kw_only=True)
class LearningRate:
    """Learning rate as a function of the step, counted from 1: update ``k`` uses ``at(k)``.

    Over ``lr_warmup_steps`` it climbs linearly to ``lr``, and stays there for ``lr_stable_steps``; then it falls to
    ``lr_min`` at ``lr_decay_steps`` along a line or half a cosine (Loshchilov and Hutter 2017, eq. 5, without restarts)
    and stays there. A constant one does not fall, and has none of these three.

    A schedule may begin anew in a run: then warm-up and the steps at ``lr`` count from there, and ``lr_decay_steps``
    stays a step of the run.

    Raises:
        ConfigError: a value is negative, the schedule is unknown or has no use for it, or there is no step left to
            decay over.
    """

    lr: float = attrs.field(default=1e-3, validator=_at_least_zero)
    lr_schedule: Schedule = "constant"
    lr_warmup_steps: int = attrs.field(default=0, validator=_at_least_zero)
    lr_stable_steps: int = attrs.field(default=0, validator=_at_least_zero)
    lr_decay_steps: int = attrs.field(default=0, validator=_at_least_zero)
    lr_min: float = attrs.field(default=0.0, validator=_at_least_zero)
    where: str = attrs.field(default="optimizer", repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what no schedule can follow."""
        check_at_most(self, {"lr": MAX_LR, **dict.fromkeys(_STEPS, MAX_STEPS)}, where=self.where)
        if self.lr_schedule not in get_args(Schedule):
            raise ConfigError(
                f"{self.where}.lr_schedule",
                expected="one of " + ", ".join(get_args(Schedule)),
                got=repr(self.lr_schedule),
            )
        if self.lr_schedule == "constant":
            for key in FALLING:
                if getattr(self, key):
                    raise ConfigError(
                        f"{self.where}.{key}",
                        expected="0, as lr_schedule 'constant' never falls",
                        got=repr(getattr(self, key)),
                        fix="Leave it out, or set lr_schedule to linear or cosine.",
                    )
        self.check(begun=0)
        if self.lr_min > self.lr:
            raise ConfigError(
                f"{self.where}.lr_min",
                expected=f"at most lr = {self.lr}",
                got=repr(self.lr_min),
                fix="Set it lower, or lr higher.",
            )

    def check(self, *, begun: int) -> None:
        """Refuse a schedule that reaches its end before it falls.

        Args:
            begun: steps that had been trained when it began.

        Raises:
            ConfigError: naming ``lr_decay_steps``.
        """
        if self.lr_schedule == "constant" or self.lr_decay_steps > self._full_until(begun):
            return
        before = "lr_warmup_steps" + (" + lr_stable_steps" if self.lr_stable_steps else "")
        raise ConfigError(
            f"{self.where}.lr_decay_steps",
            expected=f"more than {f'{begun} steps before it began + ' if begun else ''}{before}"
            f" = {self._full_until(begun)}",
            got=repr(self.lr_decay_steps),
            fix="It is the step at which lr_min is reached; 0 is run.steps.",
        )

    def _full_until(self, begun: int) -> int:
        """Return the last step before the rate falls."""
        return begun + self.lr_warmup_steps + self.lr_stable_steps

    def at(self, step: int, *, begun: int = 0) -> float:
        """Return the learning rate of update ``step`` of a schedule before which ``begun`` steps were trained."""
        full_until = self._full_until(begun)
        if step - begun < self.lr_warmup_steps:
            return self.lr * (step - begun) / self.lr_warmup_steps
        if self.lr_schedule == "constant" or step <= full_until:
            return self.lr
        share = min((step - full_until) / (self.lr_decay_steps - full_until), 1.0)
        left = 1 - share if self.lr_schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.lr_min + (self.lr - self.lr_min) * left
