"""The settings of `[rerun]`: how results of steps are judged, and the fault that may be injected to test it."""

from __future__ import annotations

import math
from typing import Literal

import attrs

from mimo.hooks import at_least, from_zero, must_be
from mimo.trainer.config.fields import setting

Corrupted = Literal["forward", "gradient"]

_finite = must_be("a finite number", math.isfinite)


@attrs.frozen(kw_only=True)
class InjectSettings:
    """A fault to inject as a test of the rerun machine: the values of one pass are corrupted."""

    step: int = setting(
        "step in which values are corrupted, to test the rerun machine; 0: none", validator=[at_least(0)], default=0
    )
    module: str = setting("module whose values are corrupted", default="")
    rank: int = setting("rank that corrupts them", default=0, validator=[at_least(0)])
    what: Corrupted = setting(  # noqa: RUF009 -- declares a field, as all do
        "forward: the rows that a pass returns; gradient: the gradient of these rows", default="forward"
    )
    microbatch: int = setting("microbatch of the pass", default=0, validator=[at_least(0)])
    factor: float = setting("factor that they are multiplied by; 0: they become NaN", default=0.0, validator=[_finite])
    times: int = setting(
        "number of runs of the step that are corrupted; 0: all, after restarts too", default=0, validator=[at_least(0)]
    )
    device: str = setting("identity of the only device that corrupts; empty: any", default="")


@attrs.frozen(kw_only=True)
class RerunSettings:
    """How results of steps are checked; anomalous ones are computed again."""

    mode: Literal["disabled", "validate", "report_determinism"] = setting(
        "disabled; validate: anomalous results are computed again; report_determinism: each step runs twice",
        default="disabled",
    )
    spike_factor: float = setting(
        "a loss or gradient norm this many times the largest recent one is anomalous; 0: off",
        default=10.0,
        validator=[from_zero()],
    )
    spike_steps: int = setting(
        "recent steps of which the largest counts, once so many were accepted", default=100, validator=[at_least(1)]
    )
    pass_factor: float = setting(
        "a pass whose rows or gradients are this many times the largest recent ones is anomalous; 0: off",
        default=100.0,
        validator=[from_zero()],
    )
    tolerance: float = setting(
        "largest relative difference between two runs of a step that is no fault; 0: as measured",
        default=0.0,
        validator=[from_zero()],
    )
    skip_steps: tuple[int, ...] = setting("steps to skip: data and learning rate advance, weights stay", default=())
    device: str | tuple[str, ...] = setting(
        "identity of this machine, or a list of those of ranks; empty: the hardware's own", default=""
    )
    inject: InjectSettings = setting(  # noqa: RUF009 -- declares a field, as all do
        "a fault to inject as a test of the rerun machine", default=attrs.Factory(InjectSettings)
    )
