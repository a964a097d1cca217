"""The boundary: moves rows along an edge, and their gradients back, between any two placements.

Forward and backward are adjoint, and what is replicated counts once: a source that holds the same rows on several
tensor ranks shares the sending, and each gets the full gradient; a target that needs all rows on each tensor rank is
sent one slice a rank, and the slices are gathered inside the group. A route counts rows of the whole tensor in
both directions; R rows of it, H columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule.routes import Route, RoutePiece, Span, Traffic, clipped, count, shifted
from mimo.schedule.runtime.channel import Channel, Messages
from mimo.schedule.runtime.join import Join, join_of, pack, unpack
from mimo.schedule.runtime.progress import NullProgress, Progress

_MAX_UNSENT = 4
"""Microbatches whose messages may be on their way at once on one channel."""
_REMEMBERED = 128
"""Routes, each in either direction, of which what they bring is remembered; past this, all are forgotten."""


@attrs.frozen
class Pending:
    """Rows that are being received; ``wait()`` returns them, once."""

    wait: Callable[[], Tensor]


@attrs.frozen(kw_only=True)
class _Source:
    """A message that is received.

    Args:
        peer: from whom.
        rows: how many.
        places: of the rows in the buffer.
        fills: whether they are the whole buffer.
    """

    peer: int
    rows: int
    places: tuple[Span, ...]
    fills: bool


@attrs.frozen(kw_only=True)
class _Arrivals:
    """What comes to a rank by a route, in one direction.

    Args:
        join: makes a tensor of the ranks' buffers.
        room: rows of the buffer.
        sources: of the messages.
        own: of the rows that this rank has itself, which belong into the buffer; None where it has none.
        places: of these in the buffer.
        is_in_place: whether they are the result themselves.
        in_batch: whether receives begin in one batch with this rank's sends.
    """

    join: Join
    room: int
    sources: tuple[_Source, ...]
    own: Span | None
    places: tuple[Span, ...]
    is_in_place: bool
    in_batch: bool


@attrs.define
class _Mailbox:
    """One direction of the edge: its channel, and by microbatch what is on its way.

    Args:
        channel: of its messages.
        flying: messages on their way out, held untouched until they are sent, each with its peer.
        unposted: receives that begin in one batch with this rank's sends, and where what is waited for is put then.
        in_place: rows for this rank itself.
    """

    channel: Channel
    flying: dict[int, list[tuple[dist.Work, Tensor, int]]] = attrs.field(factory=dict)
    unposted: dict[int, tuple[Messages, list[dist.Work]]] = attrs.field(factory=dict)
    in_place: dict[int, Tensor] = attrs.field(factory=dict)
    sent_rows: int = 0
    sent_bytes: int = 0
    in_place_rows: int = 0


class Boundary:
    """One edge as one rank sees it.

    Args:
        rank: this rank.
        width: columns of the rows, H.
        dtype, device: of the rows.
        channels: forward and backward channel of the edge.
        source_group: this rank's tensor group at the source, None where it is no source.
        target_group: this rank's tensor group at the target, None where it is no target.
        edge: its name.
        progress: receives for whom this rank waits.
    """

    def __init__(
        self,
        *,
        rank: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        channels: tuple[Channel, Channel],
        source_group: dist.ProcessGroup | None,
        target_group: dist.ProcessGroup | None,
        edge: str = "",
        progress: Progress | None = None,
    ) -> None:
        self._rank = rank
        self._edge = edge
        self._progress = progress or NullProgress()
        self._width = width
        self._dtype = dtype
        self._device = device
        self._source_group = source_group
        self._target_group = target_group
        self._rows, self._gradients = map(_Mailbox, channels)
        self._known: dict[tuple[int, bool], tuple[Route, _Arrivals]] = {}
        """By the route's `id`, and whether gradients come; the route is held too, so that no other one gets its id."""

    def send(self, route: Route, microbatch: int, rows: Tensor) -> None:
        """Start sending this source's ``rows`` [held, H]."""
        assert rows.shape == (route.held, self._width), (rows.shape, route.held, self._width)
        self._post(self._rows, route.sends, microbatch, rows)

    def receive(self, route: Route, microbatch: int) -> Pending:
        """Start receiving; waiting returns the rows [wanted, H] that this target needs: its lane's, or its share."""
        return self._expect(self._rows, self._arrivals(route, gradient=False), microbatch)

    def send_gradient(self, route: Route, microbatch: int, gradient: Tensor) -> None:
        """Start sending back the gradient [wanted, H] of what `receive` returned: of the rows that came here."""
        assert gradient.shape == (route.wanted, self._width), (gradient.shape, route.wanted, self._width)
        self._post(self._gradients, route.receives, microbatch, gradient)

    def receive_gradient(self, route: Route, microbatch: int) -> Pending:
        """Start receiving; waiting returns the whole gradient [held, H] of this source's rows, on each tensor rank."""
        return self._expect(self._gradients, self._arrivals(route, gradient=True), microbatch)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for box in (self._rows, self._gradients):
            self._wait_until_sent(box)
            assert not box.unposted, "receives were never posted, as their batch has no send"
            assert not box.in_place, "rows for this rank itself were never received"

    def take_traffic(self) -> Traffic:
        """Return what was sent since the last call, and count from 0 again."""
        traffic = Traffic(
            rows_sent=self._rows.sent_rows,
            bytes_sent=self._rows.sent_bytes,
            rows_in_place=self._rows.in_place_rows,
            gradient_rows_sent=self._gradients.sent_rows,
            gradient_bytes_sent=self._gradients.sent_bytes,
        )
        for box in (self._rows, self._gradients):
            box.sent_rows = box.sent_bytes = box.in_place_rows = 0
        return traffic

    def _post(self, box: _Mailbox, pieces: Sequence[RoutePiece], microbatch: int, rows: Tensor) -> None:
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)
        # Nothing else frees what was sent: with gloo only waiting shows that a message has left. The plan was
        # proved with sends that wait for their receivers, so waiting here can't deadlock.
        self._wait_until_sent(box, _MAX_UNSENT - 1)
        rows = rows.contiguous()
        sends = []
        for piece in pieces:
            part = pack(rows, piece.spans)
            if piece.peer == self._rank:
                box.in_place[microbatch] = part
                box.in_place_rows += part.shape[0]
            else:
                box.sent_rows += part.shape[0]
                box.sent_bytes += part.nbytes
                sends.append((part, piece.peer))
        receives, received = box.unposted.pop(microbatch, ((), []))
        if sends or receives:
            sent, works = box.channel.start(sends, receives)
            received += works
            if sends:
                box.flying[microbatch] = [(work, *message) for work, message in zip(sent, sends, strict=True)]

    def _wait_until_sent(self, box: _Mailbox, newest: int = 0) -> None:
        """Wait until all but the messages of the ``newest`` microbatches have left, and free them."""
        if len(box.flying) <= newest:
            return
        for microbatch in list(box.flying)[: len(box.flying) - newest]:
            for work, _, peer in box.flying.pop(microbatch):
                self._await(work, peer)

    def _await(self, work: dist.Work, peer: int) -> None:
        self._progress.wait(self._edge, peer)
        work.wait()
        self._progress.resume(work.is_completed)

    def _arrivals(self, route: Route, *, gradient: bool) -> _Arrivals:
        """Return what a route brings, looked up once."""
        key = (id(route), gradient)
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            self._known[key] = (route, self._looked_up(route, gradient=gradient))
        return self._known[key][1]

    def _looked_up(self, route: Route, *, gradient: bool) -> _Arrivals:
        if gradient:
            join = join_of(route.source_join, route.held, self._source_group)
            box, pieces, sends = self._gradients, route.sends, route.receives
        else:
            join = join_of(route.target_join, route.wanted, self._target_group)
            box, pieces, sends = self._rows, route.receives, route.sends
        first, stop = join.own
        own = [piece for piece in pieces if piece.peer == self._rank]
        before, spans = clipped(own[0].spans, join.own) if own else (0, ())
        # Rows that this rank has already are the result themselves if nothing else belongs into the buffer.
        is_in_place = spans == (join.own,) and join.room == stop - first and not join.writes
        sources = []
        for piece in pieces:
            if piece.peer != self._rank:
                places = tuple(shifted(piece.spans, first))
                fills = places == ((0, join.room),)
                sources.append(_Source(peer=piece.peer, rows=piece.rows, places=places, fills=fills))
        return _Arrivals(
            join=join,
            room=0 if is_in_place else join.room,
            sources=tuple(sources),
            own=(before, before + count(spans)) if own else None,
            places=tuple(shifted(spans, first)),
            is_in_place=is_in_place,
            in_batch=box.channel.is_serial and any(piece.peer != self._rank for piece in sends),
        )

    def _expect(self, box: _Mailbox, arrivals: _Arrivals, microbatch: int) -> Pending:
        """Receive what comes; the result waits for all, joins it, and returns the tensor."""
        buffer, sources = self._empty(arrivals.room), arrivals.sources
        receives = [(self._room(source, buffer), source.peer) for source in sources]
        works: list[dist.Work] = []
        if arrivals.in_batch:
            box.unposted[microbatch] = (receives, works)
        elif receives:
            works += box.channel.start((), receives)[1]

        def take() -> Tensor:
            assert len(works) == len(receives), "rows are awaited before the send that they come with"
            for work, (rows, peer), source in zip(works, receives, sources, strict=True):
                self._await(work, peer)
                if len(source.places) > 1:
                    unpack(rows, source.places, buffer)
            if arrivals.own is None:
                return arrivals.join(buffer)
            own_rows = box.in_place.pop(microbatch)[slice(*arrivals.own)]
            if arrivals.is_in_place:
                return arrivals.join(own_rows)
            unpack(own_rows, arrivals.places, buffer)
            return arrivals.join(buffer)

        return Pending(take)

    def _room(self, source: _Source, buffer: Tensor) -> Tensor:
        """Return where a message's rows are put as they come: in the buffer, if they lie there one after the other."""
        if source.fills:
            return buffer
        return buffer[slice(*source.places[0])] if len(source.places) == 1 else self._empty(source.rows)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, self._width), dtype=self._dtype, device=self._device)
