"""Checks of ``[load]`` against ``checkpoint.load``: settings that would have no effect are refused."""

from __future__ import annotations

import attrs

from mimo.hooks import ConfigError
from mimo.trainer.config.settings import LoadSettings, Settings
from mimo.trainer.config.structure import unstructure

_RESUMING = ("optimizer", "rng", "schedule", "data")
"""State that a resumed run loads, and that a new run that takes weights alone does not use."""


def check_load(settings: Settings) -> None:
    """Refuse settings of ``[load]`` that would be ignored, and two checkpoints to start from.

    Raises:
        ConfigError: by the path of the key.
    """
    load, where = settings.load, settings.checkpoint.load
    if load.finetune and where not in {"none", "latest"}:
        raise ConfigError(
            "load.finetune",
            expected="nothing beside checkpoint.load, which names another checkpoint to begin with",
            got=repr(load.finetune),
            fix='Leave one of them out: on the command line, load.finetune="" or checkpoint.load=none does so.',
        )
    defaults = LoadSettings()
    for field in attrs.fields(LoadSettings):
        value = getattr(load, field.name)
        if value == getattr(defaults, field.name):
            continue
        if load.finetune and field.name in _RESUMING:
            raise ConfigError(
                f"load.{field.name}",
                expected="true, as load.finetune takes weights alone",
                got="false",
                fix="Leave it out.",
            )
        if not load.finetune and where == "none":
            raise ConfigError(
                f"load.{field.name}",
                expected="nothing, as no checkpoint is loaded: checkpoint.load is none",
                got=repr(unstructure(value)),
                fix="Set checkpoint.load or load.finetune, or leave it out.",
            )
    for here, there in load.rename.items():
        if not here or not (there or load.finetune):
            raise ConfigError(
                "load.rename",
                expected="prefixes of names, or with load.finetune '' for what begins new",
                got=f"{here!r} = {there!r}",
            )
