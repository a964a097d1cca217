"""Routes are remembered by how rows lie, and not forever."""

from __future__ import annotations

from mimo.schedule import Route
from mimo.trainer.batch.route_cache import RouteCache


def test_routes_of_the_same_layout_are_found_once() -> None:
    """What one microbatch added, a later one of the same layout finds; another layout does not."""
    cache = RouteCache()
    cache.of((3, 4))["vision->language", 0] = Route(held=7)
    assert cache.of((3, 4)) == {("vision->language", 0): Route(held=7)}
    assert cache.of((4, 3)) == {}


def test_layouts_not_asked_for_longest_are_forgotten_first() -> None:
    """A run of ever new layouts keeps as many of them as there is room for."""
    cache = RouteCache(2)
    for layout in ("first", "second"):
        cache.of(layout)["edge", 0] = Route()
    assert cache.of("first")
    assert not cache.of("third")
    assert cache.of("first")
    assert not cache.of("second")
