"""Checks of `[rerun]` against the other settings and the module graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.topology import ModuleGraph, show_ranks
from mimo.trainer.config.rerun_settings import InjectSettings, RerunSettings
from mimo.trainer.config.settings import Settings


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
