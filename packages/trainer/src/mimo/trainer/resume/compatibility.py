"""Whether a run's settings can resume a checkpoint, decided before anything is launched; and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from filecmp import cmp
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.model import lora_linear
from mimo.trainer.config.names import SETTINGS
from mimo.trainer.config.renamed import with_new_names
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.config.structure import unstructure
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.resume.data_order import check_order
from mimo.trainer.resume.renaming import Renaming
from mimo.trainer.resume.resume_point import Source

_OF_MODULE = ("plugin", "modality", "config", "lora")
_NEW: Mapping[str, Mapping[str, Any]] = {"data": {"longer": "cut"}, "tokenizer": {}}
"""By section, settings that earlier checkpoints lack, with what was done then."""
_OF_LOADING = ("workers", "ahead", "ahead_bytes", "hand_on")
_MISSING = "nothing"
_AROUND_TEXTS = ("end", "placeholders", "markers", "items")
"""Settings of a tokenizer by which no id of a text becomes another."""
_FILES = ("path", "file")


def check_source(job: Job, source: Source | None) -> None:
    """Refuse settings with which a run can't go on as the checkpoint's did, all of them at once; without one, none.

    Raises:
        ConfigError: by the path of the setting.
        CheckpointError: no run has saved the checkpoint.
    """
    if source is None:
        _check_whole(job)
        return
    problems = [*_check_modules(job, source), *_check_lora(job, source), *_check_teachers(job, source)]
    problems += [] if source.finetunes else _check_run(job, source)
    refuse(problems, str(source.folder))


def refuse(problems: list[ConfigError], folder: str) -> None:
    """Raise what is wrong beside a checkpoint, as one error.

    Raises:
        ConfigError: if there is any.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            "settings", expected=f"ones that go with {folder}", got=f"{len(problems)} that don't:{lines}\n"
        )


def optimizer_settings(module: JobModule) -> Mapping[str, Any]:
    """Return what the parameters of a module are stepped by, as plain data, patterns by their path."""
    rules = module.optimizer.rules
    found = {}
    for where, rule in [("", rules.base), *((pattern.where, pattern.rule) for pattern in rules.patterns)]:
        rate = unstructure(rule.learning_rate)
        keys = {"plugin": rule.spec.name, **unstructure(rule.config), **rate, "clip_group": rule.clip_group}
        found[where] = {key: value for key, value in keys.items() if key not in {"where", *rule.spec.lays}}
    return found


def differences(job: Job, source: Source) -> Iterator[str]:
    """Yield what settings say otherwise than those that the checkpoint was saved with, where a result follows from it.

    Layouts are left out, as nothing follows from them; where weights alone are taken, all but the modules is.
    """
    before, now = source.manifest.config, job.plain
    there = Renaming(source.take.rename).there
    for module in job.modules:
        yield from _of_one(module, before.get("modules", {}).get(there(module.name), {}), job, source)
    if source.finetunes:
        return
    for section in ("data", "tokenizer"):
        if section in before:
            yield from _compare(section, *(_decisive({**_NEW[section], **table[section]}) for table in (before, now)))
    if "run" in before:
        runs = ({"batch_tokens": 0, **table["run"]} for table in (before, now))
        yield from _compare("run", *(_only(run, ("precision", "batch_tokens")) for run in runs))
    for module in job.modules:
        entry = source.manifest.owned.get(f"{SETTINGS}.{there(module.name)}")
        if entry is not None:
            saved = with_new_names({"optimizer": {"patterns": entry.value}})["optimizer"]["patterns"]
            yield from _compare(f"optimizer of {module.name}", saved, optimizer_settings(module))
    if "optimizer" in before:
        clips = (_only(table["optimizer"], ("clip", "clip_groups")) for table in (before, now))
        yield from _compare("optimizer", *clips)


def _of_one(module: JobModule, old: Mapping[str, Any], job: Job, source: Source) -> Iterator[str]:
    """Yield the differences of a module from its table there, if there is one."""
    new = job.plain["modules"][module.name]
    if not old:
        return
    if Renaming(source.take.rename).there(module.name) in source.imported:
        new = _within(new, old)
    elif old.get("plugin") == module.spec.name:
        old = {**old, "config": {**_defaults(type(module.config)), **old.get("config", {})}}
    yield from _compare(f"modules.{module.name}", _of_module(old), _of_module(new))


def with_balance(job: Job, source: Source | None) -> Job:
    """Return the job with samples placed as in the run that it resumes, unless its own settings say how.

    A run that has said nothing about it was by count.
    """
    if source is None or source.finetunes or job.settings.data.balance != "auto":
        return job
    saved = source.manifest.config.get("data")
    return job.balanced("cost" if isinstance(saved, Mapping) and saved.get("balance") == "cost" else "count")


def _check_modules(job: Job, source: Source) -> Iterator[ConfigError]:
    """Yield modules that the checkpoint lacks, and those that it has beside, unless settings allow for them.

    One of which a renamed part alone is in the checkpoint, or goes on, is neither: its names are compared at loading.
    """
    take, saved = source.take, source.manifest.topology
    renaming = Renaming(take.rename)
    there = {module.name: renaming.modules_there(module.name) & saved.keys() for module in job.modules}
    shared = [name for name, found in there.items() if found]
    has = ", ".join(sorted(saved)) or "none"
    if source.finetunes:
        if not shared:
            yield ConfigError(
                "load.finetune",
                expected=f"a checkpoint with any of {', '.join(module.name for module in job.modules)}",
                got=f"one with {has}",
                fix='If they are called otherwise there, set load.rename: vision = "encoder".',
            )
        return
    for module in job.modules:
        if module.name not in shared and not _covered(module.name, take.may_lack):
            yield ConfigError(
                f"modules.{module.name}",
                expected=f"a module of {str(source.folder)!r}, which has {has}",
                got="a new one",
                fix=f'Add "{module.name}.*" to load.may_lack to begin it with its initial weights, or name it in '
                "load.rename if it is called otherwise there.",
            )
    for name in sorted(saved.keys() - frozenset[str]().union(*there.values())):
        if not _covered(name, take.may_leave):
            yield ConfigError(
                f"modules.{name}",
                expected=f"a module, as {str(source.folder)!r} has one of this name",
                got="none",
                fix=f'Add "{name}.*" to load.may_leave to go on without it, or name it in load.rename if it is called '
                "otherwise here.",
            )


def _check_whole(job: Job) -> None:
    """Refuse to leave out of checkpoints what no checkpoint has: a run of its own begins with values that follow."""
    partly = [module.name for module in job.modules if module.lora is not None or module.frozen]
    if partly and not job.settings.checkpoint.frozen:
        raise ConfigError(
            "checkpoint.frozen",
            expected=f"true, since no checkpoint has what is not trained of {', '.join(partly)}",
            got="false",
            fix="Leave it out, or begin with a checkpoint that has all of it: load.finetune.",
        )


def _check_lora(job: Job, source: Source) -> Iterator[ConfigError]:
    """Yield modules of which the checkpoint has what LoRA has learned, where nothing takes it."""
    there = Renaming(source.take.rename).there
    tables = source.manifest.config.get("modules", {})
    for module in job.modules:
        before = tables.get(there(module.name), {}).get("lora")
        names = [name for name in source.manifest.tensors if name.startswith(f"{there(module.name)}.")]
        learned = [name for name in names if before is not None and lora_linear(name) is not None]
        if module.lora is None and not all(_matched(name, source.take.may_leave) for name in learned):
            yield ConfigError(
                f"modules.{module.name}.lora",
                expected=f"that of {str(source.folder)!r}, of rank {before['rank']}",
                got="none",
                fix=f"Set it, or begin with its weights and what was added to them: `mimo checkpoint merge "
                f"{source.folder} OUT`.",
            )


def _check_teachers(job: Job, source: Source) -> Iterator[ConfigError]:
    """Yield teachers that the checkpoint has learned by other ids, as far as its settings and their files say."""
    before, now = source.manifest.config.get("tokenizer"), job.plain["tokenizer"]
    renaming = Renaming(source.take.rename)
    for teacher in job.teachers:
        if before is not None and renaming.modules_there(teacher.name) & source.manifest.topology.keys():
            others = [f"tokenizer.{key}" for key in _other_texts(before, now)]
            if others:
                yield ConfigError(
                    f"modules.{teacher.name}",
                    expected="a teacher by the tokenizer of this run, as both read and write the same ids",
                    got=f"that of {str(source.folder)!r}, where {', '.join(others)} was another",
                    fix="Set the tokenizer as it was there, or take another teacher.",
                )


def _other_texts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of tokenizers by which an id may mean other texts; files differ by what they hold.

    One that isn't there any more may have held anything, and decides nothing.
    """
    for key in now:
        one, other = before.get(key), now[key]
        if key in before and key not in _AROUND_TEXTS and one != other:
            files = [Path(path) for path in (one, other) if key in _FILES and isinstance(path, str)]
            are_there = len(files) == 2 and all(map(Path.is_file, files))  # noqa: PLR2004 - one of each table
            if len(files) < 2 or (are_there and not cmp(files[0], files[1], shallow=False)):  # noqa: PLR2004 - likewise
                yield key


def _check_run(job: Job, source: Source) -> Iterator[ConfigError]:
    """Yield what of the run's place in its data and schedule the checkpoint doesn't go with."""
    run, take, folder = job.settings.run, source.take, repr(str(source.folder))
    if take.rng and run.seed != source.progress("seed"):
        yield ConfigError(
            "run.seed",
            expected=f"{source.progress('seed')}, as in the run that {folder} was saved by",
            got=repr(run.seed),
            fix="The order of samples follows from it. Set it so, or load.rng = false to go on with another.",
        )
    if take.data:
        fix = "Positions in the data are counted by it. Set load.data = false to begin with the data anew."
        if run.global_batch != source.progress("global_batch"):
            yield ConfigError(
                "run.global_batch",
                expected=f"{source.progress('global_batch')}, as in the run that {folder} was saved by",
                got=repr(run.global_batch),
                fix=f"{fix} micro_batch may change freely.",
            )
        yield from check_order(job, source)
    rates = {rate.where: rate for module in job.modules for rate in _rates(module)}
    for rate in rates.values():
        try:
            rate.check(begun=source.schedule_begun)
        except ConfigError as error:
            yield error


def _rates(module: JobModule) -> Iterator[Any]:
    rules = module.optimizer.rules
    yield from (rule.learning_rate for rule in (rules.base, *(pattern.rule for pattern in rules.patterns)))


def _matched(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _covered(module: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether patterns name all that a module has."""
    return any(fnmatchcase(f"{module}.", pattern) for pattern in patterns)


def _only(table: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any]:
    return {key: table[key] for key in keys if key in table}


def _of_module(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return of a module's table what results follow from."""
    feeds = table.get("feeds", LANGUAGE)
    return {**_only(table, _OF_MODULE), "feeds": [feeds] if isinstance(feeds, str) else feeds}


def _defaults(config: type[attrs.AttrsInstance]) -> Mapping[str, Any]:
    """Return what a config class has for keys that nobody sets, as checkpoints from before such a key was there."""
    found = {}
    for field in attrs.fields(config):
        factory = getattr(field.default, "factory", None)
        if field.default is not attrs.NOTHING and not getattr(field.default, "takes_self", False):
            found[field.name] = unstructure(field.default if factory is None else factory())
    return found


def _decisive(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table of data without keys on which samples don't depend, or that a resumed run keeps."""
    return {key: value for key, value in table.items() if key not in (*_OF_LOADING, "order", "balance")}


def _within(table: Any, other: Any) -> Any:
    """Return of a table what another one has too: a published folder decides some settings of a module alone."""
    if not isinstance(table, Mapping) or not isinstance(other, Mapping):
        return table
    return {key: _within(table[key], other[key]) for key in table if key in other}


def _compare(where: str, before: Any, now: Any) -> Iterator[str]:
    """Yield where plain data differs, by path."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*now, *(key for key in before if key not in now)]:
            place = f"{where}.{key}" if key else where
            yield from _compare(place, before.get(key, _MISSING), now.get(key, _MISSING))
    elif before != now:
        yield f"{where} {_show(now)} (was {_show(before)})"


def _show(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
