"""The settings of `[rerun]`: how results of steps are judged, and the fault that may be injected to test it."""

from __future__ import annotations

from typing import Literal

import attrs

from mimo.trainer.config.fields import at_least, finite, setting

Spoiled = Literal["forward", "gradient"]


@attrs.frozen(kw_only=True)
class InjectSettings:
    """A fault to be made, to see the machine at work: numbers of one pass are spoiled."""

    step: int = setting(
        "step in which numbers are spoiled, to see what is made of it; 0: none", validator=[at_least(0)], default=0
    )
    module: str = setting("whose", default="")
    rank: int = setting("on which rank", default=0, validator=[at_least(0)])
    what: Spoiled = setting(  # noqa: RUF009 -- declares a field, as all do
        "forward: the rows that a pass makes; gradient: the gradient that comes back to them", default="forward"
    )
    microbatch: int = setting("of which microbatch", default=0, validator=[at_least(0)])
    factor: float = setting("what they are multiplied by; 0: they are no numbers", default=0.0, validator=[finite])
    times: int = setting(
        "in how many runs of the step; 0: in all, and after restarts too", default=0, validator=[at_least(0)]
    )
    device: str = setting("only on the device of this identity; empty: on any", default="")


@attrs.frozen(kw_only=True)
class RerunSettings:
    """How results of steps are judged, and run again when they can't be right."""

    mode: Literal["disabled", "validate", "report_determinism"] = setting(
        "disabled; validate: what can't be right is run again; report_determinism: each step runs twice",
        default="disabled",
    )
    spike_factor: float = setting(
        "a loss or gradient norm this many times the largest of late can't be right; 0: off",
        default=10.0,
        validator=[at_least(0), finite],
    )
    spike_steps: int = setting(
        "steps of which the largest counts, once as many were accepted", default=100, validator=[at_least(1)]
    )
    pass_factor: float = setting(
        "rows or gradients of a pass this many times the largest of late are run again; 0: off",
        default=100.0,
        validator=[at_least(0), finite],
    )
    tolerance: float = setting(
        "relative difference of two runs of a step that is no fault; 0: what was measured",
        default=0.0,
        validator=[at_least(0), finite],
    )
    skip_steps: tuple[int, ...] = setting("bad steps: data and learning rate go on, weights stay", default=())
    device: str | tuple[str, ...] = setting(
        "identity of this machine, or a list of those of ranks; empty: the hardware's own", default=""
    )
    inject: InjectSettings = setting(  # noqa: RUF009 -- declares a field, as all do
        "a fault to be made, to see the machine at work", default=attrs.Factory(InjectSettings)
    )
