"""Which optimizer steps which parameters: keys of a module override the global table, those of patterns both."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import attrs

from mimo.hooks import ConfigError
from mimo.optimizer import OptimizerSpec, Pattern, Rule
from mimo.trainer.config.plugin_kinds import Find
from mimo.trainer.config.settings import GLOBAL_ONLY, OptimizerSettings, Settings
from mimo.trainer.config.structure import structure, suggest
from mimo.trainer.job.job import JobModule, OptimizerChoice
from mimo.trainer.resolving.optimizer_tables import GLOBAL, KeyTable, choose, either, global_table


def resolve_optimizer(settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` says of all modules.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    own = settings.optimizer
    for name, clip in own.clip_groups.items():
        if not 0 <= clip < math.inf:
            raise ConfigError(
                f"{GLOBAL}.clip_groups.{name}",
                expected="a finite number of 0 or more",
                got=repr(clip),
                fix="0 clips nothing.",
            )
    if own.clip_by != "global" and not own.clip and not any(own.clip_groups.values()):
        raise ConfigError(
            f"{GLOBAL}.clip_by",
            expected="global, as nothing is clipped: optimizer.clip is 0",
            got=repr(own.clip_by),
            fix="Set optimizer.clip, or leave it out.",
        )
    if own.clip_group:
        raise ConfigError(
            f"{GLOBAL}.clip_group",
            expected="nothing, as the parameters of a clip group are chosen by modules and patterns",
            got=repr(own.clip_group),
            fix="Set modules.<name>.optimizer.clip_group, or clip_by.",
        )
    for glob in own.patterns:
        if not any(_may_match(glob, name) for name in settings.modules):
            raise ConfigError(
                f'{GLOBAL}.patterns."{glob}"',
                expected=f"a pattern of full names, which begin with {either(settings.modules)}",
                got="one that matches none",
                fix=suggest(glob.partition(".")[0], [f"{name}." for name in settings.modules]),
            )
    return choose((global_table(settings),), settings, find)


def resolve_module_optimizer(name: str, settings: Settings, find: Find) -> OptimizerChoice:
    """Return what ``[optimizer]`` and ``[modules.<name>.optimizer]`` say together, and the patterns of both.

    Raises:
        ConfigError: a key is wrong, by its path.
    """
    table = settings.modules[name].optimizer
    where = f"modules.{name}.optimizer"
    _refuse_global_keys(table, where, "module")
    patterns = structure({"patterns": table.get("patterns", {})}, OptimizerSettings, where).patterns
    written = KeyTable(where, {key: value for key, value in table.items() if key != "patterns"})
    tables = (global_table(settings), written)
    choice = choose(tables, settings, find)
    homes = [(where, f"{name}.", patterns), (GLOBAL, "", settings.optimizer.patterns)]
    return attrs.evolve(
        choice,
        clip_group=_clip_group(choice, name, settings),
        patterns=tuple(
            Pattern(
                glob=glob,
                table=home,
                prefix=prefix,
                rule=_rule(name, choice, (*tables, KeyTable(f'{home}.patterns."{glob}"', keys)), settings, find),
            )
            for home, prefix, globs in homes
            for glob, keys in globs.items()
            if _may_match(prefix + glob, name)
        ),
    )


def refuse_keys_of_frozen(name: str, keys: Collection[str], spec: OptimizerSpec) -> None:
    """Refuse keys of a module's own table where nothing of it is trained: they may only say how its parameters lie.

    Raises:
        ConfigError: by the path of the key.
    """
    for key in keys:
        if key != "plugin" and key not in spec.lays:
            raise ConfigError(
                f"modules.{name}.optimizer.{key}",
                expected=f"no key but {either(('plugin', *sorted(spec.lays)))}, as nothing of the module is trained",
                got=key,
                fix=f"Remove it, or take something out of modules.{name}.frozen.",
            )


def check_clip_groups(settings: Settings, trained: Collection[JobModule]) -> None:
    """Refuse a largest norm of a clip group that nothing is in.

    Args:
        settings: the whole file.
        trained: the modules of which anything is trained.

    Raises:
        ConfigError: by the path of the group.
    """
    known = {group for module in trained for group in module.optimizer.rules.clip_groups if group}
    for name in settings.optimizer.clip_groups:
        if name not in known:
            fix = suggest(name, known) if known else "Set clip_group in the table of a module or a pattern."
            if name in settings.modules:
                by_module = settings.optimizer.clip_by == "module"
                fix = "Nothing of it is trained." if by_module else "Set optimizer.clip_by = 'module' to make it one."
            raise ConfigError(
                f"{GLOBAL}.clip_groups.{name}",
                expected="the name of a clip group that anything trained is in",
                got=repr(name),
                fix=fix,
            )


def follows_one_plugin(choice: OptimizerChoice, modules: Collection[JobModule]) -> bool:
    """Tell whether all parameters of modules are stepped by the plugin of ``[optimizer]``."""
    rules = [module.optimizer.rules for module in modules]
    steppers = [rule for each in rules for rule in (each.base, *(pattern.rule for pattern in each.patterns))]
    return all(rule.spec.name == choice.spec.name for rule in steppers)


def _rule(name: str, choice: OptimizerChoice, tables: Sequence[KeyTable], settings: Settings, find: Find) -> Rule:
    """Return what the last of ``tables``, a pattern's, says over the others, a module's."""
    pattern = tables[-1]
    if not pattern.keys:
        raise ConfigError(
            pattern.where, expected="keys that differ for what it matches", got="none", fix="Set one: lr = 1e-4."
        )
    _refuse_global_keys(pattern.keys, pattern.where, "pattern")
    if "patterns" in pattern.keys:
        raise ConfigError(
            f"{pattern.where}.patterns",
            expected="a key that a pattern can have",
            got="patterns inside a pattern",
            fix=f"Write them in optimizer.patterns or modules.{name}.optimizer.patterns.",
        )
    found = choose(tables, settings, find)
    for key in pattern.keys:
        if key in found.spec.lays:
            table = f"modules.{name}.optimizer"
            fix = f"Set {table}.{key}."
            if key not in choice.spec.lays:
                fix = f"Set {table}.plugin to one that has it, such as {found.spec.name!r}, and {table}.{key}."
            raise ConfigError(
                f"{pattern.where}.{key}",
                expected="a key that a pattern can have",
                got=f"{key}, which all parameters of a module have in common",
                fix=fix,
            )
    return Rule(
        spec=found.spec,
        config=found.config,
        learning_rate=found.learning_rate,
        clip_group=_clip_group(found, name, settings),
    )


def _clip_group(choice: OptimizerChoice, name: str, settings: Settings) -> str:
    """Return the clip group of parameters of a module: that which the settings name, or by ``clip_by``."""
    return choice.settings.clip_group or (name if settings.optimizer.clip_by == "module" else "")


def _refuse_global_keys(keys: Collection[str], where: str, owner: str) -> None:
    for key in keys:
        if key in GLOBAL_ONLY:
            fix = f"Set optimizer.{key}."
            if key == "clip":
                fix = "Set optimizer.clip, or that of its clip group: optimizer.clip_groups.<clip group>."
            raise ConfigError(
                f"{where}.{key}",
                expected=f"a key that a {owner} can have for itself",
                got=f"{key}, which is one for the whole model",
                fix=fix,
            )


def _may_match(glob: str, name: str) -> bool:
    """Return whether a pattern may match full names of a module, by its text before any wildcard."""
    before, prefix = re.split(r"[*?\[]", glob, maxsplit=1)[0], f"{name}."
    return before.startswith(prefix) or (before != glob and prefix.startswith(before))
