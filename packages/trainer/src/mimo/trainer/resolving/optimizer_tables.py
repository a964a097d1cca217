"""Tables of optimizer keys, each over those before it, as one choice: its plugin, that one's settings, and its rate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from mimo.hooks import ConfigError, discover
from mimo.optimizer import FALLING, OPTIMIZERS, LearningRate, OptimizerSpec
from mimo.trainer.config.plugin_kinds import Find
from mimo.trainer.config.settings import SHARED_OPTIMIZER_KEYS, OptimizerSettings, Settings
from mimo.trainer.config.structure import structure
from mimo.trainer.job.job import OptimizerChoice

GLOBAL = "optimizer"
"""Path of the table of all modules."""


@attrs.frozen
class KeyTable:
    """The keys that a table writes, patterns left out, and its path."""

    where: str
    keys: Mapping[str, Any]


def global_table(settings: Settings) -> KeyTable:
    """Return what ``[optimizer]`` writes; a key that is its default is as good as left out."""
    own, defaults = settings.optimizer, OptimizerSettings()
    shared = {key: getattr(own, key) for key in SHARED_OPTIMIZER_KEYS if key != "patterns"}
    written = {key: value for key, value in shared.items() if value != getattr(defaults, key)}
    return KeyTable(GLOBAL, {**written, **own.config})


def choose(tables: Sequence[KeyTable], settings: Settings, find: Find) -> OptimizerChoice:
    """Return what tables say together.

    A plugin takes over keys that were written for another one where it has keys of these names, and no defaults.

    Args:
        tables: outermost first: each one's keys are over those before it.
        settings: the whole file.
        find: where plugins come from.

    Raises:
        ConfigError: a key is wrong, by its path in the last of them.
    """
    where, own = tables[-1].where, tables[-1].keys
    try:
        return _check(tables, settings, find)
    except ConfigError as error:
        key = error.where.removeprefix(f"{where}.").partition("[")[0]
        home = next((table.where for table in reversed(tables[:-1]) if key in table.keys), "")
        if key in own or not home:
            raise
        raise ConfigError(
            error.where, expected=error.expected, got=f"{error.got}, inherited from {home}", fix=error.fix
        ) from error


def _check(tables: Sequence[KeyTable], settings: Settings, find: Find) -> OptimizerChoice:
    where, written = tables[-1].where, tables[-1].keys
    own = structure({key: value for table in tables for key, value in table.keys.items()}, OptimizerSettings, where)
    spec = find(OPTIMIZERS, own.plugin, f"{where}.plugin")
    given = _of_plugin(own.config, spec, where, written)
    config: Any = structure(given, spec.config, where, siblings=SHARED_OPTIMIZER_KEYS)
    _check_clip_group(own.clip_group, where, settings)
    return OptimizerChoice(
        spec=spec,
        config=config,
        settings=attrs.evolve(own, config=given),
        learning_rate=_learning_rate(own, settings.run.steps, where, written),
    )


def _check_clip_group(group: str, where: str, settings: Settings) -> None:
    if group and not settings.optimizer.clip and not settings.optimizer.clip_of(group):
        raise ConfigError(
            f"{where}.clip_group",
            expected="nothing, as nothing is clipped: optimizer.clip is 0",
            got=repr(group),
            fix=f"Set optimizer.clip or optimizer.clip_groups.{group}, or leave it out.",
        )
    if group in settings.modules:
        raise ConfigError(
            f"{where}.clip_group",
            expected="a name that no module has",
            got=repr(group),
            fix="Call the group otherwise; optimizer.clip_by = 'module' makes one for each module.",
        )


def _learning_rate(own: OptimizerSettings, steps: int, where: str, written: Collection[str]) -> LearningRate:
    """Return the learning rate; a constant one takes no inherited keys of those that fall."""
    falls = own.lr_schedule != "constant"
    falling: dict[str, Any] = {key: getattr(own, key) for key in FALLING if falls or key in written}
    if falls and not own.lr_decay_steps:
        falling["lr_decay_steps"] = steps
        _check_steps(own, steps, where)
    return LearningRate(
        lr=own.lr, lr_schedule=own.lr_schedule, lr_warmup_steps=own.lr_warmup_steps, where=where, **falling
    )


def _check_steps(own: OptimizerSettings, steps: int, where: str) -> None:
    """Refuse a rate that begins to fall when the run ends, by the keys that the user wrote."""
    for key, before in (("lr_warmup_steps", 0), ("lr_stable_steps", own.lr_warmup_steps)):
        if steps <= before + getattr(own, key):
            less = f" - lr_warmup_steps = {steps - before}" if before else f" = {steps}"
            raise ConfigError(
                f"{where}.{key}",
                expected=f"fewer than run.steps{less}, as lr_min is reached at run.steps",
                got=repr(getattr(own, key)),
                fix="Set it lower, or set lr_decay_steps.",
            )


def _of_plugin(
    config: Mapping[str, Any], spec: OptimizerSpec, where: str, written: Collection[str]
) -> Mapping[str, Any]:
    """Return the settings of a plugin: those written for it, and of inherited ones those that it has.

    One of another plugin is refused by that plugin's name; a misspelled one later, with the nearest key.
    """
    known = {field.name for field in attrs.fields(spec.config)}
    clash = known & set(SHARED_OPTIMIZER_KEYS)
    assert not clash, (spec.name, clash)
    for key in (config.keys() - known) & set(written):
        others = discover(OPTIMIZERS, where=f"{where}.plugin").items()
        owners = [name for name, other in others if key in {field.name for field in attrs.fields(other.config)}]
        if owners:
            raise ConfigError(
                f"{where}.{key}",
                expected=f"a key of optimizer {spec.name!r}",
                got=f"a key of {either(map(repr, sorted(owners)))}",
                fix=f"Remove it, or set {where}.plugin.",
            )
    return {key: value for key, value in config.items() if key in written or key in known}


def either(values: Iterable[Any]) -> str:
    """Return values as words: ``a, b or c``."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last
