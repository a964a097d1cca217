"""Which rows go from which rank to which on an edge: spans, routes, and how much traffic they make."""

from mimo.schedule.routes.route import Cut, End, Route, RoutePiece, boundary_route, pipeline_route
from mimo.schedule.routes.spans import Span, clipped, count, shifted
from mimo.schedule.routes.traffic import Traffic

__all__ = [
    "Cut",
    "End",
    "Route",
    "RoutePiece",
    "Span",
    "Traffic",
    "boundary_route",
    "clipped",
    "count",
    "pipeline_route",
    "shifted",
]
