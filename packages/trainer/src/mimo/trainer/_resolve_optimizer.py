"""Which optimizer steps a module: the global table, with the module's own keys merged over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.optimizer import OPTIMIZERS, LearningRate
from mimo.trainer._plugins import Find
from mimo.trainer._resolved import OptimizerChoice
from mimo.trainer._settings import GLOBAL_ONLY, SHARED_OPTIMIZER_KEYS, OptimizerSettings, Settings
from mimo.trainer._structure import structure


def resolve_optimizer(settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` says.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    return _choose(settings.optimizer, settings.run.steps, "optimizer", find)


def resolve_module_optimizer(name: str, settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` and ``[modules.<name>.optimizer]`` say together.

    The plugin's keys are taken over from the global table only where the plugin is the same.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    where = f"modules.{name}.optimizer"
    table, base = settings.modules[name].optimizer, settings.optimizer
    for key in table:
        if key in GLOBAL_ONLY:
            raise ConfigError(
                f"{where}.{key}",
                expected="a key that a module can have for itself",
                got=f"{key}, which is one for the whole model",
                fix=f"Set optimizer.{key}.",
            )
    own: Mapping[str, Any] = base.config if table.get("plugin", base.plugin) == base.plugin else {}
    shared = {key: value for key, value in attrs.asdict(base, recurse=False).items() if key in SHARED_OPTIMIZER_KEYS}
    return _choose(structure({**shared, **own, **table}, OptimizerSettings, where), settings.run.steps, where, find)


def _choose(settings: OptimizerSettings, steps: int, where: str, find: Find) -> OptimizerChoice:
    spec = find(OPTIMIZERS, settings.plugin, f"{where}.plugin")
    known = {field.name for field in attrs.fields(spec.config)}
    clash = known & set(SHARED_OPTIMIZER_KEYS)
    assert not clash, (spec.name, clash)
    config: Any = structure(settings.config, spec.config, where, siblings=SHARED_OPTIMIZER_KEYS)
    decays = settings.lr_schedule != "constant" and not settings.lr_decay_steps
    if decays and steps <= settings.lr_warmup_steps:  # told by the keys that the user wrote
        raise ConfigError(
            f"{where}.lr_warmup_steps",
            expected=f"fewer than run.steps = {steps}, the step at which lr_min is reached",
            got=repr(settings.lr_warmup_steps),
            fix="Set it lower, or set lr_decay_steps.",
        )
    return OptimizerChoice(
        spec=spec,
        config=config,
        settings=settings,
        learning_rate=LearningRate(
            lr=settings.lr,
            lr_schedule=settings.lr_schedule,
            lr_warmup_steps=settings.lr_warmup_steps,
            lr_decay_steps=settings.lr_decay_steps or steps,
            lr_min=settings.lr_min,
            where=where,
        ),
    )
