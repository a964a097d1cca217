"""Who is installed: the entry points of our groups, in a fixed order, and the rows that describe them.

Two entry points of one name in one group are refused here, for plain `importlib.metadata` lets the last one win.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

import attrs

from mimo.hooks._errors import PluginError
from mimo.hooks._markers import PROJECT

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class PluginEntry:
    """A plugin that loaded: its entry point, where it comes from, the hooks it implements, the specs it registers."""

    group: str
    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]
    specs: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class PluginFailure:
    """A plugin that is installed and cannot be used; ``error`` says why."""

    group: str
    name: str
    distribution: str
    version: str
    error: PluginError


def installed(given: Iterable[EntryPoint] | None) -> tuple[EntryPoint, ...]:
    """Return the entry points of all ``mimo`` groups, in an order that does not depend on where they were found.

    All groups, since one module may serve several of them.
    """
    found = _of_environment() if given is None else given
    ours = [point for point in found if _is_ours(point.group)]
    sharing = Counter((point.group, point.name) for point in ours)

    def place(point: EntryPoint) -> tuple[str, str, str, str]:
        # A distribution reads its metadata whenever it is asked who it is.
        who = origin(point) if sharing[point.group, point.name] > 1 else ""
        return point.group, point.name, who, point.value

    return tuple(sorted(ours, key=place))


def origin(point: EntryPoint) -> str:
    """Return distribution and version of an entry point, for messages: ``mimo-encoder-vision 0.1.0``."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def describe(point: EntryPoint) -> str:
    """Return the place that errors about an entry point name."""
    return f"plugin {point.name!r} of {origin(point)} (entry point {point.group}: {point.value})"


def row(point: EntryPoint, *, hooks: tuple[str, ...], specs: tuple[str, ...] = ()) -> PluginEntry:
    """Return the row of a plugin that works."""
    return PluginEntry(
        group=point.group,
        name=point.name,
        distribution=point.dist.name if point.dist else "",
        version=point.dist.version if point.dist else "",
        hooks=hooks,
        specs=specs,
    )


def failure(point: EntryPoint, error: PluginError) -> PluginFailure:
    """Return the row of a plugin that cannot be used."""
    return PluginFailure(
        group=point.group,
        name=point.name,
        distribution=point.dist.name if point.dist else "",
        version=point.dist.version if point.dist else "",
        error=error,
    )


def ask_each(group: str, points: Collection[EntryPoint], ask: Callable[[EntryPoint], T]) -> list[T | PluginFailure]:
    """Ask every entry point of a group, and keep the refusals in their places among the answers."""
    outcomes: list[T | PluginFailure] = []
    for point in (point for point in points if point.group == group):
        try:
            _check_name(point, points)
            outcomes.append(ask(point))
        except PluginError as error:
            outcomes.append(failure(point, error))
    return outcomes


def _of_environment() -> Iterable[EntryPoint]:
    """Return our entry points of each distribution once: the first on the path, as for imports."""
    return _found_on(tuple(map(_place_and_time, sys.path)))


def _place_and_time(path: str) -> tuple[str, int]:
    """Return a folder of the path and when something in it was installed or removed last."""
    place = Path(path).absolute()
    try:
        return str(place), place.stat().st_mtime_ns
    except OSError:
        return str(place), 0


@lru_cache(maxsize=1)
def _found_on(_path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return our entry points on the path as it is now: to read what all distributions say takes long."""
    everything = entry_points()
    return tuple(point for group in everything.groups if _is_ours(group) for point in everything.select(group=group))


def _is_ours(group: str) -> bool:
    return group.startswith(f"{PROJECT}.")


def _check_name(point: EntryPoint, points: Collection[EntryPoint]) -> None:
    """Refuse two entry points with one name in one group: only one of them could be meant.

    Raises:
        PluginError: names both distributions.
    """
    rivals = [other for other in points if (other.group, other.name) == (point.group, point.name)]
    if len(rivals) > 1:
        raise PluginError(
            f"entry point {point.group}: {point.name}",
            expected="one distribution with this name",
            got=" and ".join(f"{origin(rival)} ({rival.value})" for rival in rivals),
            fix="Uninstall one of them, or ask its author for another name.",
        )
