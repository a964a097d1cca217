"""The caller of lifecycle hooks: plugins of group ``mimo.lifecycle`` and objects handed in, behind typed methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import cast

import attrs
import pluggy

from mimo.hooks import hookspecs
from mimo.hooks._contract import (
    LIFECYCLE_GROUP,
    check_homes,
    hooks_of,
    load_plugin,
    refuse_class,
    specified,
    unspecified,
)
from mimo.hooks._errors import PluginError, UserError
from mimo.hooks._installed import PluginEntry, PluginFailure, ask_each, describe, installed, row
from mimo.hooks._markers import PROJECT
from mimo.hooks._values import EvaluationInfo, IndexInfo, RunInfo, Stateful, StepInfo


class Lifecycle(pluggy.PluginManager):
    """A plugin manager whose hooks have typed callers; ``hook.mimo_*`` stays for those who want pluggy's own."""

    def run_begin(self, run: RunInfo) -> None:
        """Call `mimo_run_begin` of every plugin."""
        self.hook.mimo_run_begin(run=run)

    def step_begin(self, run: RunInfo, step: int) -> None:
        """Call `mimo_step_begin` of every plugin; ``step`` counts from 1."""
        self.hook.mimo_step_begin(run=run, step=step)

    def step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Call `mimo_step_end` of every plugin."""
        self.hook.mimo_step_end(run=run, info=info)

    def evaluated(self, run: RunInfo, info: EvaluationInfo) -> None:
        """Call `mimo_evaluated` of every plugin."""
        self.hook.mimo_evaluated(run=run, info=info)

    def save_failed(self, run: RunInfo, step: int, error: UserError) -> None:
        """Call `mimo_save_failed` of every plugin; ``step`` is the last one trained."""
        self.hook.mimo_save_failed(run=run, step=step, error=error)

    def run_end(self, run: RunInfo) -> list[PluginError]:
        """Call `mimo_run_end` of every plugin, each by itself, and return what went wrong in any of them.

        Nothing is raised: what a run has come to is settled by then.
        """
        return self._each("mimo_run_end", run=run)

    def fault(self, run: RunInfo, error: BaseException) -> list[PluginError]:
        """Call `mimo_fault` of every plugin, and return what went wrong, as `run_end` does."""
        return self._each("mimo_fault", run=run, error=error)

    def indexed(self, index: IndexInfo) -> list[PluginError]:
        """Call `mimo_indexed` of every plugin, and return what went wrong, as `run_end` does."""
        return self._each("mimo_indexed", index=index)

    def state(self, run: RunInfo) -> list[Stateful]:
        """Return what all plugins add to a checkpoint.

        Raises:
            PluginError: a plugin returns something else, or two parts have one name.
        """
        owners: dict[str, str] = {}
        parts: list[Stateful] = []
        for where, plugin in reversed(self.list_name_plugin()):
            for part in _state_of(plugin, where, run):
                if part.name in owners:
                    raise PluginError(
                        f"state {part.name!r}",
                        expected="one plugin that contributes it",
                        got=f"{owners[part.name]} and {where}",
                        fix="Rename one of them; the name is its key in the checkpoint.",
                    )
                owners[part.name] = where
                parts.append(part)
        return parts

    def _each(self, hook: str, **given: object) -> list[PluginError]:
        """Call a hook of one plugin after another, and return an error for each that raised, its cause beside it."""
        failures = []
        for where, plugin in reversed(self.list_name_plugin()):
            caller = _without_plugins()
            _register(caller, plugin, where)
            try:
                getattr(caller.hook, hook)(**given)
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- whatever a third-party plugin does
                failure = PluginError(f"{where}, {hook}", expected="no exception", got=_said(error))
                failure.__cause__ = error
                failures.append(failure)
        return failures


def lifecycle(extra: Sequence[object] = (), *, entry_points: Iterable[EntryPoint] | None = None) -> Lifecycle:
    """Return the caller of all lifecycle plugins: ``extra`` in its order, then the installed ones by name.

    An entry point is a module, an object, or a class: of a class each caller has an instance of its own, made without
    arguments, so that what it remembers belongs to one run.

    Args:
        extra: modules or objects that carry `hookimpl` functions.
        entry_points: look among these instead of what is installed.

    Raises:
        PluginError: a plugin cannot be imported, clashes with another, or breaks the hook contract.
    """
    plugins: list[tuple[str, object]] = []
    for index, plugin in enumerate(extra):
        where = f"lifecycle plugin {index + 1}, {_called(plugin)}"
        refuse_class(plugin, where)
        hooks = hooks_of(plugin, where)
        for hook in hooks:
            if hook not in specified(hookspecs):
                raise unspecified(hook, specified(hookspecs), where)
        _check_any(hooks, where)
        plugins.append((where, plugin))
    for outcome in _examine(entry_points):
        if isinstance(outcome, PluginFailure):
            raise outcome.error
        plugins.append((outcome.where, outcome.plugin))
    caller = _without_plugins()
    for where, plugin in reversed(plugins):  # pluggy calls the last registered first
        _register(caller, plugin, where)
    return caller


def examine_lifecycle(entry_points: Iterable[EntryPoint] | None = None) -> list[PluginEntry | PluginFailure]:
    """Return every installed lifecycle plugin, those that cannot be used included."""
    outcomes = _examine(entry_points)
    return [outcome if isinstance(outcome, PluginFailure) else outcome.entry for outcome in outcomes]


@attrs.frozen(kw_only=True)
class _Listener:
    """A lifecycle plugin that may be registered, beside who it is."""

    where: str
    entry: PluginEntry
    plugin: object


def _examine(entry_points: Iterable[EntryPoint] | None) -> list[_Listener | PluginFailure]:
    points = installed(entry_points)
    return ask_each(LIFECYCLE_GROUP, points, lambda point: _ask(point, points))


def _ask(point: EntryPoint, points: tuple[EntryPoint, ...]) -> _Listener:
    """Import one plugin and register it alone, which checks its hooks.

    Raises:
        PluginError: the plugin breaks the contract.
    """
    where = describe(point)
    plugin = _made(load_plugin(point), where)
    hooks = hooks_of(plugin, where)
    check_homes(hooks, known=specified(hookspecs), point=point, points=points)
    _check_any([hook for hook in hooks if hook in specified(hookspecs)], where)
    _register(_without_plugins(), plugin, where)
    return _Listener(where=where, entry=row(point, hooks=hooks), plugin=plugin)


def _state_of(plugin: object, where: str, run: RunInfo) -> list[Stateful]:
    """Ask one plugin alone for its state, so that the answer is known to be its own."""
    caller = _without_plugins()
    _register(caller, plugin, where)
    if not caller.hook.mimo_state.get_hookimpls():
        return []
    answers = cast("list[object]", caller.hook.mimo_state(run=run))
    parts = answers[0] if answers else None  # pluggy leaves out an answer of None
    if not isinstance(parts, list) or not all(isinstance(part, Stateful) for part in parts):
        raise PluginError(
            f"{where}, mimo_state", expected="a list of Stateful parts", got=repr(parts), fix="Correct what it returns."
        )
    return parts


def _said(error: BaseException) -> str:
    """Return an exception's type and text, which a third-party one may fail to give."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 -- whatever its text does
        return f"{type(error).__name__}, which has no text"


def _made(plugin: object, where: str) -> object:
    """Return a new instance of a class, which so has a state of its own for each run; anything else as it is."""
    if not isinstance(plugin, type):
        return plugin
    try:
        made: object = plugin()
    except Exception as error:  # whatever a third-party class does while it is made
        raise PluginError(
            where,
            expected=f"a class {plugin.__qualname__} that is made without arguments",
            got=f"{type(error).__name__}: {error}",
            fix="It learns of the run in mimo_run_begin.",
        ) from error
    return made


def _without_plugins() -> Lifecycle:
    caller = Lifecycle(PROJECT)
    caller.add_hookspecs(hookspecs)
    return caller


def _check_any(hooks: Sequence[str], where: str) -> None:
    if not hooks:
        raise PluginError(
            where,
            expected=f"at least one lifecycle hook ({', '.join(sorted(specified(hookspecs)))})",
            got="none",
            fix="Mark its functions with @mimo.hooks.hookimpl.",
        )


def _register(caller: Lifecycle, plugin: object, where: str) -> None:
    try:
        caller.register(plugin, name=where)
    except (ValueError, pluggy.PluginValidationError) as error:  # registered twice; arguments the hook lacks
        raise PluginError(
            where, expected="hooks as they are specified, registered once", got=" ".join(str(error).split())
        ) from error


def _called(plugin: object) -> str:
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__qualname__
