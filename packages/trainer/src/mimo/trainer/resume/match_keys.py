"""Which names of a run a checkpoint may lack, and which of its own may be left: decided from names alone.

A name is allowed for by a cause: a setting, a parameter that was or is not trained, a part that is not taken. States of
a parameter go with it. What has no cause is refused by `mimo.checkpoint.load`, with everything else that doesn't fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import attrs

from mimo.hooks import ConfigError
from mimo.model import lora_linear, lora_names
from mimo.trainer.config.names import BASE, BUFFERS, IMPORTED, OPTIMIZER, PROGRESS, RERUN, SETTINGS
from mimo.trainer.config.settings import LoadSettings
from mimo.trainer.resume.renaming import Renaming

_UNTRAINED = "optimizer states of what was not trained"
_FROZEN = "optimizer states of what is not trained"
_ALL_STATES = "all optimizer states"
_INITIAL = "weights"
_LORA = "LoRA"


@attrs.frozen(kw_only=True)
class Fit:
    """How a run's names go with a checkpoint's.

    Args:
        rename: prefixes of names here, and what the checkpoint has instead.
        may_lack: names here, and patterns of them.
        may_leave: names in the checkpoint, and patterns of them.
        new: what begins new, in words.
        left: what of the checkpoint is left, in words.
        found: first keys of names here, of any rank, that the checkpoint has.
        problems: optimizers that have no use for the checkpoint's states, or should find some and don't.
    """

    rename: Mapping[str, str]
    may_lack: tuple[str, ...]
    may_leave: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]
    found: frozenset[str]
    problems: tuple[ConfigError, ...]


def fit(
    asked: Collection[str],
    held: Collection[str],
    *,
    modules: Collection[str],
    saved: Collection[str],
    take: LoadSettings,
    finetunes: bool = False,
    untaken: Collection[str] = (),
    trained: Collection[str] = (),
    fresh: Collection[str] = (),
    adapted: Collection[str] = (),
) -> Fit:
    """Decide about all names at once.

    Args:
        asked: names here, of all ranks.
        held: names in the checkpoint.
        modules: names of the modules here.
        saved: names of those in the checkpoint.
        take: what settings say.
        finetunes: whether weights alone are taken, of modules that both have.
        untaken: first keys of parts whose state is not taken.
        trained: names of the modules in the checkpoint that were trained.
        fresh: prefixes of names of which the checkpoint can have nothing: where it was read from there was none.
        adapted: names of the modules here that have LoRA, which begins new beside a linear that had none.
    """
    renaming = Renaming.of(take.rename, asked)
    there = {name: renaming.there(name) for name in asked}
    names = _Names.of(asked=there, held=frozenset(held), modules=modules)
    lacking = dict(_lacking(names, take, finetunes=finetunes, fresh=fresh, adapted=adapted))
    leaving = dict(_leaving(names, take, saved=saved, finetunes=finetunes, untaken=untaken))
    return Fit(
        rename=renaming.prefixes,
        may_lack=(*lacking, *take.may_lack),
        may_leave=(*leaving, *take.may_leave),
        new=_count_causes(lacking),
        left=_count_causes(leaving),
        found=frozenset(_first(here) for here, there in names.asked.items() if there in names.held),
        problems=(*_other_optimizers(names), *_without_states(names, trained)),
    )


@attrs.frozen(kw_only=True)
class _Names:
    """Names here with those in the checkpoint, and the states of parameters on either side by the parameter there."""

    asked: Mapping[str, str]
    held: frozenset[str]
    weights: Mapping[str, str]
    states: Mapping[str, frozenset[str]]
    held_states: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, *, asked: Mapping[str, str], held: frozenset[str], modules: Collection[str]) -> _Names:
        return cls(
            asked=asked,
            held=held,
            weights={here: there for here, there in asked.items() if _first(here) in modules},
            states=_states(asked.values()),
            held_states=_states(held),
        )


def _lacking(
    names: _Names, take: LoadSettings, *, finetunes: bool, fresh: Collection[str], adapted: Collection[str]
) -> Iterable[tuple[str, str]]:
    """Yield names here that the checkpoint lacks and may lack, each with what to call it."""
    firsts = {_first(name) for name in names.held}
    new = set()
    for here, there in names.weights.items():
        is_absent = finetunes and (_first(there) not in firsts or _is_below(there, fresh))
        if there not in names.held and (is_absent or _matches(here, take.may_lack)):
            new.add(there)
            yield here, f"{_INITIAL} of {_first(here)}"
        elif there not in names.held and _first(here) in adapted and _had_none(there, names.held):
            new.add(there)
            yield here, f"{_LORA} of {_first(here)}"
    for here, there in names.asked.items():
        if _first(here) == RERUN and there not in names.held:  # of ranks that were not
            yield here, ""
        parameter, _ = _state(there)
        if parameter in new and there not in names.held:
            yield here, ""
        elif parameter and not names.held_states.get(parameter) and (parameter in names.held or "." not in parameter):
            what = f"{_UNTRAINED} in {_first(_state(here)[0])}" if "." in parameter else parameter.replace("_", " ")
            yield here, what
        elif there not in names.held and here not in names.weights and _matches(here, take.may_lack):
            yield here, f"optimizer states in {_first(_state(here)[0])}" if parameter else _first(here)


def _leaving(
    names: _Names, take: LoadSettings, *, saved: Collection[str], finetunes: bool, untaken: Collection[str]
) -> Iterable[tuple[str, str]]:
    """Yield names of the checkpoint that are not asked for and may be left, each with what to call it."""
    ours = {_first(there) for there in names.weights.values()}
    weights = frozenset(names.weights.values())
    for name in names.held - frozenset(names.asked.values()):
        first, (parameter, _) = _first(name), _state(name)
        if first in {BASE, BUFFERS, IMPORTED, PROGRESS, SETTINGS, RERUN}:
            yield name, ""
        elif finetunes and first not in ours:
            yield name, first if first in saved else ""
        elif parameter and not take.optimizer:
            yield name, _ALL_STATES
        elif parameter and "." not in parameter:
            yield name, parameter.replace("_", " ")
        elif parameter and not names.states.get(parameter) and parameter in weights:
            yield name, f"{_FROZEN} in {_first(parameter)}"
        elif parameter and _matches(parameter, take.may_leave):
            yield name, ""
        elif first in untaken or _matches(name, take.may_leave):
            yield name, first


def _other_optimizers(names: _Names) -> Iterable[ConfigError]:
    """Yield the modules with parameters that need other states than those that the checkpoint has of them."""
    found: dict[str, list[tuple[frozenset[str], frozenset[str]]]] = {}
    for here, there in names.weights.items():
        wanted, held = names.states.get(there, frozenset()), names.held_states.get(there, frozenset())
        if wanted and held and not wanted & held:
            found.setdefault(_first(here), []).append((wanted, held))
    for module, pairs in found.items():
        needs, has = (", ".join(sorted(frozenset[str]().union(*side))) for side in zip(*pairs, strict=True))
        yield ConfigError(
            f"modules.{module}.optimizer.plugin",
            expected=f"one that goes on with the states that the checkpoint has for {module}: {has}",
            got=f"one that needs {needs} of {len(pairs)} parameters",
            fix="Set the plugin with which it was saved, or load.optimizer = false to begin all optimizer states new.",
        )


def _without_states(names: _Names, trained: Collection[str]) -> Iterable[ConfigError]:
    """Yield the modules that need states, and were trained, but of which the checkpoint has none at all."""
    held = {_first(parameter) for parameter in names.held_states}
    pairs = ((_first(here), _first(there)) for here, there in names.weights.items() if names.states.get(there))
    for module, before in dict.fromkeys(pairs):
        if before in trained and before not in held:
            yield ConfigError(
                f"modules.{module}",
                expected=f"optimizer states in the checkpoint, as {before} was trained",
                got="none",
                fix="Name a checkpoint that has them, or set load.optimizer = false to begin all optimizer states new.",
            )


def _count_causes(causes: Mapping[str, str]) -> tuple[str, ...]:
    counts = Counter(what for what in causes.values() if what)
    return tuple(f"{what} ({count} entries)" if count > 1 else what for what, count in sorted(counts.items()))


def _states(names: Iterable[str]) -> Mapping[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        parameter, state = _state(name)
        if parameter:
            found.setdefault(parameter, set()).add(state)
    return {parameter: frozenset(states) for parameter, states in found.items()}


def _state(name: str) -> tuple[str, str]:
    """Return of a parameter's state the parameter and the state's own key; nothing of other names."""
    first, _, rest = name.partition(".")
    parameter, _, key = rest.rpartition(".")
    return (parameter, key) if first == OPTIMIZER else ("", "")


def _is_below(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _had_none(name: str, held: frozenset[str]) -> bool:
    """Tell whether a name is of LoRA beside a linear that a checkpoint has without any."""
    linear = lora_linear(name)
    return linear is not None and f"{linear}.weight" in held and held.isdisjoint(lora_names(linear))


def _first(name: str) -> str:
    return name.partition(".")[0]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
