"""From entry points to specs: every plugin of a kind is imported, asked once, and its answer checked.

`survey` lists all of them, broken ones included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import attrs
import pluggy

from mimo.hooks._contract import check_homes, hooks_of, load_plugin, refuse_class
from mimo.hooks._errors import PluginError
from mimo.hooks._installed import PluginEntry, PluginFailure, ask_each, describe, failure, installed, origin, row
from mimo.hooks._lifecycle import examine_lifecycle
from mimo.hooks._markers import PROJECT
from mimo.hooks._registry import Registry

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class Kind(Generic[S]):
    """A kind of plugin: the entry-point group, the hook by which plugins register, and the spec that they return.

    Args:
        group: entry-point group, ``mimo.encoders``.
        noun: what one is called in messages, ``encoder``.
        hook: name of the registering hook, ``mimo_register_encoders``.
        hookspecs: the module that specifies the hook.
        spec: class of the specs; each has a ``name``.
    """

    group: str
    noun: str
    hook: str
    hookspecs: ModuleType
    spec: type[S]


@attrs.frozen(kw_only=True)
class _Answer(Generic[S]):
    """What one plugin registered, beside who it is."""

    point: EntryPoint
    entry: PluginEntry
    specs: tuple[tuple[str, S], ...]


def discover(
    kind: Kind[S], *, where: str | None = None, entry_points: Iterable[EntryPoint] | None = None
) -> Registry[S]:
    """Import every installed plugin of a kind and return its specs.

    Args:
        kind: what to look for.
        where: path of the setting that asks, ``modules.vision.plugin``; it opens the message of every error.
        entry_points: look among these instead of what is installed.

    Raises:
        PluginError: a plugin cannot be imported, clashes with another, or breaks the hook contract.
    """
    answers: list[_Answer[S]] = []
    for outcome in _examine(kind, entry_points):
        if isinstance(outcome, PluginFailure):
            raise outcome.error if where is None else outcome.error.seen_from(where)
        answers.append(outcome)
    return Registry(
        noun=kind.noun,
        specs={name: spec for answer in answers for name, spec in answer.specs},
        entries=tuple(answer.entry for answer in answers),
    )


def examine(kind: Kind[Any], entry_points: Iterable[EntryPoint] | None = None) -> list[PluginEntry | PluginFailure]:
    """Return every installed plugin of a kind, those that cannot be used included."""
    outcomes = _examine(kind, entry_points)
    return [outcome if isinstance(outcome, PluginFailure) else outcome.entry for outcome in outcomes]


def _examine(kind: Kind[S], entry_points: Iterable[EntryPoint] | None) -> list[_Answer[S] | PluginFailure]:
    points = installed(entry_points)
    outcomes = ask_each(kind.group, points, lambda point: _ask(point, kind, points))
    owners: defaultdict[str, list[EntryPoint]] = defaultdict(list)
    for outcome in outcomes:
        if isinstance(outcome, _Answer):
            for name, _ in outcome.specs:
                owners[name].append(outcome.point)
    return [_refuse_shared(outcome, owners, kind) for outcome in outcomes]


def _refuse_shared(
    outcome: _Answer[S] | PluginFailure, owners: dict[str, list[EntryPoint]], kind: Kind[S]
) -> _Answer[S] | PluginFailure:
    """Turn the answer of a plugin into a failure where another one registers a spec of the same name."""
    if isinstance(outcome, PluginFailure):
        return outcome
    for name, _ in outcome.specs:
        if len(owners[name]) > 1:
            error = PluginError(
                f"{kind.noun} {name!r}",
                expected="one plugin that registers it",
                got=" and ".join(f"{point.name!r} of {origin(point)}" for point in owners[name]),
                fix="Uninstall one of them, or ask its author for another name.",
            )
            return failure(outcome.point, error)
    return outcome


def _ask(point: EntryPoint, kind: Kind[S], points: tuple[EntryPoint, ...]) -> _Answer[S]:
    """Import one plugin and take its specs.

    Each plugin gets a manager of its own, so that an answer is known to be its own.

    Raises:
        PluginError: the plugin breaks the contract.
    """
    where = describe(point)
    plugin = load_plugin(point)
    refuse_class(plugin, where)
    hooks = hooks_of(plugin, where)
    check_homes(hooks, known={kind.hook}, point=point, points=points)
    if kind.hook not in hooks:
        raise PluginError(
            where,
            expected=f"a function {kind.hook}",
            got=f"only {', '.join(hooks)}" if hooks else "none",
            fix=f"Every entry point of {kind.group} registers {kind.noun}s by that hook.",
        )
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(kind.hookspecs)
    try:
        manager.register(plugin, name=point.name)
        results = getattr(manager.hook, kind.hook)()
    except Exception as error:  # a signature that pluggy refuses, or whatever a third-party function raises
        raise PluginError(
            where,
            expected=f"{kind.hook} to return its {kind.noun}s",
            got=f"{type(error).__name__}: {error}".rstrip("."),
            fix="Repair or uninstall this distribution.",
        ) from error
    specs = tuple(_checked(results, kind, where))
    return _Answer(point=point, entry=row(point, hooks=hooks, specs=tuple(name for name, _ in specs)), specs=specs)


def _checked(results: list[Any], kind: Kind[S], where: str) -> Iterable[tuple[str, S]]:
    """Yield the specs of one plugin by name; ``results`` is pluggy's list, empty where the hook returned None."""
    answer = results[0] if results else None
    if not isinstance(answer, list):
        raise _wrong(kind, where, got=repr(answer), expected=f"a list of {kind.spec.__name__}")
    for spec in answer:
        if not isinstance(spec, kind.spec):
            raise _wrong(kind, where, got=repr(spec), expected=f"only {kind.spec.__name__} in the list")
        name = cast("Any", spec).name  # by the contract of Kind.spec
        if not isinstance(name, str) or not name:
            raise _wrong(kind, where, got=repr(name), expected=f"a name for each {kind.spec.__name__}")
        yield name, spec


def _wrong(kind: Kind[Any], where: str, *, got: str, expected: str) -> PluginError:
    return PluginError(f"{where}, {kind.hook}", expected=expected, got=got, fix="Correct what it returns.")


def survey(
    kinds: Iterable[Kind[Any]], *, entry_points: Iterable[EntryPoint] | None = None
) -> list[PluginEntry | PluginFailure]:
    """Return a row for each plugin of ``kinds``, in their order, and then of the lifecycle group.

    A plugin that `discover` or `lifecycle` would refuse is a `PluginFailure` that holds the very error.

    Args:
        kinds: what to look for.
        entry_points: look among these instead of what is installed.
    """
    given = None if entry_points is None else tuple(entry_points)
    return [*(row for kind in kinds for row in examine(kind, given)), *examine_lifecycle(given)]
