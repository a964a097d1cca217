"""What a plugin object must be: importable, every hook marked, specified, and listed where it is called.

pluggy by itself passes over an unmarked function and a misspelled hook. Here each of them is a `PluginError` that
names the plugin and its distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint
from types import FunctionType, ModuleType

import pluggy

from mimo.hooks import hookspecs as lifecycle_hookspecs
from mimo.hooks._errors import PluginError
from mimo.hooks._installed import describe, origin
from mimo.hooks._markers import PROJECT

HOOK_PREFIX = "mimo_"
REGISTER_PREFIX = "mimo_register_"
LIFECYCLE_GROUP = "mimo.lifecycle"


def load_plugin(point: EntryPoint) -> object:
    """Import the plugin object of an entry point.

    Raises:
        PluginError: it cannot be imported.
    """
    try:
        plugin: object = point.load()
    except (Exception, SystemExit) as error:  # whatever a third-party module does while it is imported
        raise PluginError(
            describe(point),
            expected="a module that can be imported",
            got=f"{type(error).__name__}: {error}".rstrip("."),
            fix="Repair or uninstall this distribution, or install what it misses.",
        ) from error
    return plugin


def refuse_class(plugin: object, where: str) -> None:
    """Refuse a class, whose methods would be called without an instance.

    Raises:
        PluginError: ``plugin`` is a class.
    """
    if isinstance(plugin, type):
        raise PluginError(
            where,
            expected="a module or an instance that carries the hooks",
            got=f"the class {plugin.__qualname__}",
            fix=f"Name an instance of {plugin.__qualname__} instead.",
        )


def hooks_of(plugin: object, where: str) -> tuple[str, ...]:
    """Return the names of the hooks that a plugin implements, sorted.

    Raises:
        PluginError: a function named ``mimo_*`` lacks the marker.
    """
    parser = pluggy.PluginManager(PROJECT)
    hooks: list[str] = []
    for name in dir(plugin):
        options = parser.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hooks.append(options["specname"] or name)
        elif name.startswith(HOOK_PREFIX) and _is_unmarked(getattr(plugin, name)):
            raise PluginError(
                where,
                expected=f"{name} to be marked with @mimo.hooks.hookimpl",
                got="a function without the marker, which would never be called",
                fix=f"Mark it, or give it a name that does not begin with {HOOK_PREFIX}.",
            )
    return tuple(sorted(hooks))


def specified(hookspecs: ModuleType) -> frozenset[str]:
    """Return the names of the hooks that a module specifies."""
    return frozenset(
        name for name, value in vars(hookspecs).items() if isinstance(value, FunctionType) and _is_spec(value)
    )


def check_homes(
    hooks: Iterable[str], *, known: Collection[str], point: EntryPoint, points: Collection[EntryPoint]
) -> None:
    """Refuse a hook that nobody specified, and one whose own group does not list this plugin.

    A module may serve several groups; then each group answers for its own hooks, so ``known`` are those of the
    group of ``point``.

    Raises:
        PluginError: names the plugin and the hook.
    """
    for hook in (hook for hook in hooks if hook not in known):
        home = _home(hook)
        shared = any(
            (other.group, other.value) == (home, point.value) and origin(other) == origin(point) for other in points
        )
        if shared and home != point.group:
            continue
        if home not in {point.group, LIFECYCLE_GROUP, *(other.group for other in points)} or home == point.group:
            raise unspecified(hook, known, describe(point))
        raise PluginError(
            describe(point),
            expected=f"{hook} in a module that is an entry point of {home}",
            got=f"only one of {point.group}, where it would never be called",
            fix=f"List {point.value} under {home} too.",
        )


def unspecified(hook: str, known: Collection[str], where: str) -> PluginError:
    """Return the error about a hook that nobody specified."""
    return PluginError(
        where,
        expected=f"hooks that are specified ({', '.join(sorted(known))})",
        got=f"{hook!r}, which nobody specified",
        fix="Correct its name, or remove it.",
    )


def _home(hook: str) -> str | None:
    """Return the group to which a hook belongs by its name; None where no group can have it."""
    if hook in specified(lifecycle_hookspecs):
        return LIFECYCLE_GROUP
    return f"{PROJECT}.{hook.removeprefix(REGISTER_PREFIX)}" if hook.startswith(REGISTER_PREFIX) else None


def _is_spec(function: object) -> bool:
    return hasattr(function, f"{PROJECT}_spec")


def _is_unmarked(value: object) -> bool:
    return inspect.isroutine(value) and not _is_spec(value)
