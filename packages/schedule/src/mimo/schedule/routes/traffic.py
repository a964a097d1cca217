"""How much one rank sends on one edge, counted by boundaries as they send or computed from routes."""

from __future__ import annotations

import attrs

from mimo.schedule.routes.route import Route


@attrs.frozen(kw_only=True)
class Traffic:
    """Rows and bytes that a rank sent to others on an edge, as rows forward and as gradients backward.

    ``rows_in_place`` were for the rank itself: neither they nor their gradients were sent.
    """

    rows_sent: int = 0
    bytes_sent: int = 0
    rows_in_place: int = 0
    gradient_rows_sent: int = 0
    gradient_bytes_sent: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sums of both."""
        return Traffic(
            rows_sent=self.rows_sent + other.rows_sent,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            rows_in_place=self.rows_in_place + other.rows_in_place,
            gradient_rows_sent=self.gradient_rows_sent + other.gradient_rows_sent,
            gradient_bytes_sent=self.gradient_bytes_sent + other.gradient_bytes_sent,
        )

    @classmethod
    def of(cls, route: Route, *, rank: int, row_bytes: int, gradient: bool) -> Traffic:
        """Return what ``rank`` will send by its route.

        Args:
            route: of one microbatch on one edge.
            rank: whose route it is.
            row_bytes: bytes of one row.
            gradient: whether the edge carries gradient.
        """
        sent = sum(piece.rows for piece in route.sends if piece.peer != rank)
        returned = sum(piece.rows for piece in route.receives if piece.peer != rank) if gradient else 0
        return cls(
            rows_sent=sent,
            bytes_sent=sent * row_bytes,
            rows_in_place=sum(piece.rows for piece in route.sends if piece.peer == rank),
            gradient_rows_sent=returned,
            gradient_bytes_sent=returned * row_bytes,
        )
