"""Which optimizer steps which parameters: the global table, a module's keys over it, those of patterns over both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from mimo.hooks import ConfigError, discover
from mimo.optimizer import OPTIMIZERS, LearningRate, OptimizerSpec, Pattern, Rule
from mimo.trainer._plugins import Find
from mimo.trainer._resolved import OptimizerChoice
from mimo.trainer._settings import GLOBAL_ONLY, SHARED_OPTIMIZER_KEYS, OptimizerSettings, Settings
from mimo.trainer._structure import structure, suggest

_GLOBAL = "optimizer"
_NO_PATTERNS: Mapping[str, Any] = {"patterns": {}}


def resolve_optimizer(settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` says of all modules.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    own = settings.optimizer
    if own.clip_by != "global" and not own.clip:
        raise ConfigError(
            "optimizer.clip_by",
            expected="global, as nothing is clipped: optimizer.clip is 0",
            got=repr(own.clip_by),
            fix="Set optimizer.clip, or leave it out.",
        )
    if own.clip_group:
        raise ConfigError(
            "optimizer.clip_group",
            expected="nothing, as the parameters of a clip group are chosen by modules and patterns",
            got=repr(own.clip_group),
            fix="Set modules.<name>.optimizer.clip_group, or clip_by.",
        )
    for glob in own.patterns:
        if not any(_may_match(glob, name) for name in settings.modules):
            raise ConfigError(
                f'{_GLOBAL}.patterns."{glob}"',
                expected=f"a pattern of full names, which begin with {_either(settings.modules)}",
                got="one that matches none",
                fix=suggest(glob.partition(".")[0], [f"{name}." for name in settings.modules]),
            )
    return _choose(own, settings, _GLOBAL, find)


def resolve_module_optimizer(name: str, settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` and ``[modules.<name>.optimizer]`` say together, and the patterns of both.

    The plugin's keys are taken over from the global table only where the plugin is the same.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    where = f"modules.{name}.optimizer"
    table = settings.modules[name].optimizer
    for key in table:
        if key in GLOBAL_ONLY:
            raise ConfigError(
                f"{where}.{key}",
                expected="a key that a module can have for itself",
                got=f"{key}, which is one for the whole model",
                fix=f"Set optimizer.{key}.",
            )
    own = _merged(settings.optimizer, table, where)
    default = name if settings.optimizer.clip_by == "module" else ""
    choice = attrs.evolve(_choose(own, settings, where, find), clip_group=own.clip_group or default)
    written = [(where, f"{name}.", own.patterns), (_GLOBAL, "", settings.optimizer.patterns)]
    return attrs.evolve(
        choice,
        patterns=tuple(
            pattern
            for home, prefix, patterns in written
            for pattern in _patterns(choice, settings, find, name=name, home=home, prefix=prefix, written=patterns)
        ),
    )


def _patterns(
    choice: OptimizerChoice,
    settings: Settings,
    find: Find,
    *,
    name: str,
    home: str,
    prefix: str,
    written: Mapping[str, Mapping[str, Any]],
) -> Iterator[Pattern]:
    """Yield the patterns of one table that may match parameters of a module, their keys merged over the module's."""
    for glob, keys in written.items():
        if not _may_match(prefix + glob, name):
            continue
        where = f'{home}.patterns."{glob}"'
        _check_keys(keys, where, name)
        found = _choose(_merged(choice.settings, keys, where), settings, where, find)
        for key in keys:
            if key in found.spec.lays:
                raise ConfigError(
                    f"{where}.{key}",
                    expected="a key that a pattern can have",
                    got=f"{key}, by which all parameters of a module lie",
                    fix=f"Set modules.{name}.optimizer.{key}.",
                )
        rule = Rule(
            spec=found.spec,
            config=found.config,
            learning_rate=found.learning_rate,
            clip_group=found.settings.clip_group or choice.clip_group,
        )
        yield Pattern(glob=glob, table=home, prefix=prefix, rule=rule)


def _check_keys(keys: Mapping[str, Any], where: str, name: str) -> None:
    """Refuse a pattern that says nothing, and keys of whole modules."""
    if not keys:
        raise ConfigError(where, expected="keys that differ for what it matches", got="none", fix="Set one: lr = 1e-4.")
    for key in keys:
        if key in GLOBAL_ONLY:
            raise ConfigError(
                f"{where}.{key}",
                expected="a key that a pattern can have",
                got=f"{key}, which is one for the whole model",
                fix=f"Set optimizer.{key}.",
            )
        if key == "patterns":
            raise ConfigError(
                f"{where}.{key}",
                expected="a key that a pattern can have",
                got="patterns inside a pattern",
                fix=f"Write them in optimizer.patterns or modules.{name}.optimizer.patterns.",
            )


def _merged(base: OptimizerSettings, table: Mapping[str, Any], where: str) -> OptimizerSettings:
    """Return settings with a table's keys over them, without their patterns."""
    own: Mapping[str, Any] = base.config if table.get("plugin", base.plugin) == base.plugin else {}
    shared = {key: value for key, value in attrs.asdict(base, recurse=False).items() if key in SHARED_OPTIMIZER_KEYS}
    return structure({**shared, **_NO_PATTERNS, **own, **table}, OptimizerSettings, where)


def _choose(own: OptimizerSettings, settings: Settings, where: str, find: Find) -> OptimizerChoice:
    steps = settings.run.steps
    spec = find(OPTIMIZERS, own.plugin, f"{where}.plugin")
    _check_plugin_keys(spec, own.config, where)
    config: Any = structure(own.config, spec.config, where, siblings=SHARED_OPTIMIZER_KEYS)
    if own.clip_group and not settings.optimizer.clip:
        raise ConfigError(
            f"{where}.clip_group",
            expected="nothing, as nothing is clipped: optimizer.clip is 0",
            got=repr(own.clip_group),
            fix="Set optimizer.clip, or leave it out.",
        )
    if own.clip_group in settings.modules:
        raise ConfigError(
            f"{where}.clip_group",
            expected="a name that no module has",
            got=repr(own.clip_group),
            fix="Call the group otherwise; optimizer.clip_by = 'module' makes one for each module.",
        )
    decays = own.lr_schedule != "constant" and not own.lr_decay_steps
    if decays and steps <= own.lr_warmup_steps:  # told by the keys that the user wrote
        raise ConfigError(
            f"{where}.lr_warmup_steps",
            expected=f"fewer than run.steps = {steps}, the step at which lr_min is reached",
            got=repr(own.lr_warmup_steps),
            fix="Set it lower, or set lr_decay_steps.",
        )
    return OptimizerChoice(
        spec=spec,
        config=config,
        settings=own,
        learning_rate=LearningRate(
            lr=own.lr,
            lr_schedule=own.lr_schedule,
            lr_warmup_steps=own.lr_warmup_steps,
            lr_decay_steps=own.lr_decay_steps or steps,
            lr_min=own.lr_min,
            where=where,
        ),
    )


def _check_plugin_keys(spec: OptimizerSpec, given: Mapping[str, Any], where: str) -> None:
    """Refuse settings of another optimizer by its name; misspelled ones are refused with the nearest key."""
    known = {field.name for field in attrs.fields(spec.config)}
    clash = known & set(SHARED_OPTIMIZER_KEYS)
    assert not clash, (spec.name, clash)
    for key in given.keys() - known:
        others = discover(OPTIMIZERS, where=f"{where}.plugin").items()
        owners = [name for name, other in others if key in {field.name for field in attrs.fields(other.config)}]
        if owners:
            raise ConfigError(
                f"{where}.{key}",
                expected=f"a key of optimizer {spec.name!r}",
                got=f"one of {_either(map(repr, sorted(owners)))}",
                fix=f"Remove it, or set {where}.plugin.",
            )


def _may_match(glob: str, name: str) -> bool:
    """Tell whether a pattern may match full names of a module, as far as its text before any wildcard tells."""
    before, prefix = re.split(r"[*?\[]", glob, maxsplit=1)[0], f"{name}."
    return before.startswith(prefix) or (before != glob and prefix.startswith(before))


def _either(values: Any) -> str:
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last
