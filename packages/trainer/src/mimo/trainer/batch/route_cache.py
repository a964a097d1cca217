"""Routes found once: a microbatch whose rows lie as those of an earlier one goes the same ways."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping

from mimo.schedule import Route

Routes = MutableMapping[tuple[str, int], Route]
"""By name of the edge, and rank."""


class RouteCache:
    """Routes by the layout of the samples, of one job.

    Args:
        capacity: layouts that are remembered; the one that was not asked for longest is forgotten first.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._known: dict[Hashable, Routes] = {}

    def of(self, layout: Hashable) -> Routes:
        """Return what is known of a layout, to be added to."""
        routes = self._known.pop(layout, {})
        self._known[layout] = routes
        if len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]
        return routes
