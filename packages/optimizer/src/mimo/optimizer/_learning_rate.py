"""The learning rate of each step: warm-up, then constant, linear or cosine decay. A pure function of the step."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import attrs

from mimo.hooks import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


def _at_least_zero(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0 or math.isinf(value):
        raise ConfigError(
            f"{instance.where}.{attribute.name}", expected="a finite number of 0 or more", got=repr(value)
        )


@attrs.frozen(kw_only=True)
class LearningRate:
    """Learning rate as a function of the step, counted from 1: update ``k`` uses ``at(k)``.

    Over ``lr_warmup_steps`` it climbs linearly to ``lr``; then it falls to ``lr_min`` at ``lr_decay_steps`` along a
    line or half a cosine (Loshchilov and Hutter 2017, eq. 5, without restarts) and stays there.

    Raises:
        ConfigError: a value is negative, the schedule is unknown, or there is no step left to decay over.
    """

    lr: float = attrs.field(default=1e-3, validator=_at_least_zero)
    lr_schedule: Schedule = "constant"
    lr_warmup_steps: int = attrs.field(default=0, validator=_at_least_zero)
    lr_decay_steps: int = attrs.field(default=0, validator=_at_least_zero)
    lr_min: float = attrs.field(default=0.0, validator=_at_least_zero)
    where: str = attrs.field(default="optimizer", repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what no schedule can follow."""
        if self.lr_schedule not in get_args(Schedule):
            raise ConfigError(
                f"{self.where}.lr_schedule",
                expected="one of " + ", ".join(get_args(Schedule)),
                got=repr(self.lr_schedule),
            )
        if self.lr_schedule != "constant" and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ConfigError(
                f"{self.where}.lr_decay_steps",
                expected=f"more than lr_warmup_steps = {self.lr_warmup_steps}",
                got=repr(self.lr_decay_steps),
                fix="It is the step at which lr_min is reached; left out, it is run.steps.",
            )
        if self.lr_min > self.lr:
            raise ConfigError(f"{self.where}.lr_min", expected=f"at most lr = {self.lr}", got=repr(self.lr_min))

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step``."""
        if step < self.lr_warmup_steps:
            return self.lr * step / self.lr_warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        share = min((step - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps), 1.0)
        left = 1 - share if self.lr_schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.lr_min + (self.lr - self.lr_min) * left
