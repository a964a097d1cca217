"""The settings of the rerun machine, and what of them is refused beside the others. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs

from mimo.hooks import ConfigError
from mimo.topology import ModuleGraph, show_ranks
from mimo.trainer.config.fields import at_least, finite, setting

if TYPE_CHECKING:
    from mimo.trainer.config.settings import Settings

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


def check_rerun(settings: Settings, graph: ModuleGraph, *, microbatches: int, world: int) -> None:
    """Refuse settings that would not be used, and faults that could not be made.

    Raises:
        ConfigError: naming the setting under ``rerun``.
    """
    rerun = settings.rerun
    for key, why in _unused(rerun):
        raise ConfigError(
            f"rerun.{key}",
            expected=f"nothing, as {why}",
            got=repr(_value(rerun, key)),
            fix="Leave it out." if rerun.mode != "disabled" else "Leave it out, or set rerun.mode = 'validate'.",
        )
    for step in rerun.skip_steps:
        if not 1 <= step <= settings.run.steps:
            raise ConfigError(
                "rerun.skip_steps", expected=f"steps from 1 to run.steps = {settings.run.steps}", got=repr(step)
            )
    if isinstance(rerun.device, tuple) and len(rerun.device) != world:
        raise ConfigError(
            "rerun.device",
            expected=f"one text, or one for each of the {world} ranks",
            got=f"{len(rerun.device)} texts",
        )
    if rerun.inject.step:
        _check_inject(settings, graph, microbatches)


def _unused(rerun: RerunSettings) -> Iterator[tuple[str, str]]:
    """Yield what differs from its default and would be ignored, and why."""
    keys = [field.name for field in attrs.fields(RerunSettings) if field.name not in ("mode", "skip_steps", "inject")]
    allowed = {"disabled": frozenset[str](), "validate": frozenset(keys), "report_determinism": frozenset({"device"})}
    unset = RerunSettings()
    for key in keys:
        if key not in allowed[rerun.mode] and _value(rerun, key) != _value(unset, key):
            yield key, f"rerun.mode is {rerun.mode!r}"
    if not rerun.spike_factor and not rerun.pass_factor and rerun.spike_steps != unset.spike_steps:
        yield "spike_steps", "rerun.spike_factor and rerun.pass_factor are 0"
    if rerun.inject.step and rerun.mode != "validate":
        yield "inject.step", f"rerun.mode is {rerun.mode!r}, which judges no step"
    for field in attrs.fields(InjectSettings):
        if not rerun.inject.step and getattr(rerun.inject, field.name) != field.default:
            yield f"inject.{field.name}", "rerun.inject.step is 0"


def _value(rerun: RerunSettings, key: str) -> Any:
    value: Any = rerun
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_inject(settings: Settings, graph: ModuleGraph, microbatches: int) -> None:
    inject = settings.rerun.inject
    module = graph.by_name.get(inject.module)
    if module is None:
        raise ConfigError("rerun.inject.module", expected=f"one of {', '.join(graph.by_name)}", got=repr(inject.module))
    for key, got, allowed in (
        ("step", inject.step, range(1, settings.run.steps + 1)),
        ("rank", inject.rank, module.grid.ranks),
        ("microbatch", inject.microbatch, range(microbatches)),
    ):
        if got not in allowed:
            raise ConfigError(f"rerun.inject.{key}", expected=f"one of {show_ranks(allowed)}", got=repr(got))
    stages = graph.role(inject.rank).stages
    backward = any(stage.module == module.grid.name and graph.runs_backward(stage) for stage in stages)
    if inject.what == "gradient" and not backward:
        raise ConfigError(
            "rerun.inject.what", expected=f"'forward', as {inject.module} runs no backward", got="'gradient'"
        )
