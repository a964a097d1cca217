"""The boundary: moves rows along an edge, and their gradients back, between any two placements.

Forward and backward are adjoint: what is sent twice is summed, and what is replicated counts once. A source that
holds the same rows on several tensor ranks shares the sending, and each gets the whole gradient; a target that needs
all rows on each tensor rank is sent one slice a rank, and the slices are gathered inside the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule._routes import Piece, Route
from mimo.schedule.runtime._channel import Channel

_UNHEARD = 4
"""Microbatches whose messages may be on their way at once on one channel."""


@attrs.frozen
class Pending:
    """Rows on their way; ``wait()`` returns them, once."""

    wait: Callable[[], Tensor]


@attrs.define
class _Outbox:
    """Messages on their way out by microbatch, kept untouched until they have left, and rows for this rank itself."""

    flying: dict[int, list[tuple[dist.Work, Tensor]]] = attrs.field(factory=dict)
    kept: dict[int, list[tuple[Piece, Tensor]]] = attrs.field(factory=dict)

    def settle(self, newest: int = 0) -> None:
        """Wait until all but the messages of the ``newest`` microbatches have left, and let go of them."""
        for microbatch in list(self.flying)[: max(len(self.flying) - newest, 0)]:
            for work, _ in self.flying.pop(microbatch):
                work.wait()


class Boundary:
    """One edge as one rank sees it.

    Args:
        rank: this rank.
        width: columns of the rows, H.
        dtype, device: of the rows.
        channels: forward and backward channel of the edge.
        source_group: this rank's tensor group at the source, None where it is no source.
        target_group: this rank's tensor group at the target, None where it is no target.
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
    ) -> None:
        self._rank = rank
        self._width = width
        self._dtype = dtype
        self._device = device
        self._channels = channels
        self._source_group = source_group
        self._target_group = target_group
        self._rows, self._gradients = _Outbox(), _Outbox()

    def send(self, route: Route, microbatch: int, rows: Tensor) -> None:
        """Start sending this source's ``rows`` [held, H]."""
        assert rows.shape == (route.held, self._width), (rows.shape, route.held, self._width)
        self._post(self._rows, self._channels[0], route.sends, microbatch, rows)

    def receive(self, route: Route, microbatch: int) -> Pending:
        """Start receiving; waiting returns the rows [R, H] that this target needs: its lane's, or its slice of them."""
        take = self._expect(self._rows, self._channels[0], route.receives, route.wanted, microbatch)
        return Pending(lambda: self._join(take(), route.target_slices, self._target_group))

    def send_gradient(self, route: Route, microbatch: int, gradient: Tensor) -> None:
        """Start sending back the gradient of what `receive` returned; of a gathered tensor, only this rank's slice."""
        if route.target_slices:
            assert self._target_group is not None
            before = sum(route.target_slices[: self._target_group.rank()])
            gradient = gradient[before : before + route.wanted]
        assert gradient.shape == (route.wanted, self._width), (gradient.shape, route.wanted, self._width)
        self._post(self._gradients, self._channels[1], route.receives, microbatch, gradient)

    def receive_gradient(self, route: Route, microbatch: int) -> Pending:
        """Start receiving; waiting returns the whole gradient [held, H] of this source's rows, on each tensor rank."""
        if not route.source_slices:
            return Pending(self._expect(self._gradients, self._channels[1], route.sends, route.held, microbatch))
        assert self._source_group is not None
        rank = self._source_group.rank()
        before = sum(route.source_slices[:rank])
        sends = [attrs.evolve(piece, start=piece.start - before, stop=piece.stop - before) for piece in route.sends]
        take = self._expect(self._gradients, self._channels[1], sends, route.source_slices[rank], microbatch)
        return Pending(lambda: self._join(take(), route.source_slices, self._source_group))

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for box in (self._rows, self._gradients):
            box.settle()
            assert not box.kept, "rows for this rank itself were never received"

    def _post(self, box: _Outbox, channel: Channel, pieces: Sequence[Piece], microbatch: int, rows: Tensor) -> None:
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)
        # Nothing else frees what was sent: gloo says that a message has left only to those who wait for it. A plan is
        # proved with sends that wait for their receiver, so waiting here can't deadlock.
        box.settle(_UNHEARD)
        rows = rows.contiguous()
        for piece in pieces:
            part = rows[piece.start : piece.stop]
            if piece.peer == self._rank:
                box.kept.setdefault(microbatch, []).append((piece, part))
            else:
                box.flying.setdefault(microbatch, []).append((channel.send(part, piece.peer), part))

    def _expect(
        self, box: _Outbox, channel: Channel, pieces: Sequence[Piece], rows: int, microbatch: int
    ) -> Callable[[], Tensor]:
        """Post receives for ``pieces`` of a tensor of ``rows`` rows; the result waits for all and returns the tensor.

        Pieces need not cover the tensor: a row that nobody needs gets a zero gradient.
        """
        whole = len(pieces) == 1 and pieces[0] == Piece(self._rank, 0, rows)
        covered = sum(piece.stop - piece.start for piece in pieces) == rows
        if whole or not rows:
            buffer = torch.empty((0, self._width), dtype=self._dtype, device=self._device)
        else:
            make = torch.empty if covered else torch.zeros
            buffer = make((rows, self._width), dtype=self._dtype, device=self._device)
        works = [
            channel.receive(buffer[piece.start : piece.stop], piece.peer)
            for piece in pieces
            if piece.peer != self._rank
        ]

        def take() -> Tensor:
            for work in works:
                work.wait()
            own = [piece for piece in pieces if piece.peer == self._rank]
            parts = box.kept.pop(microbatch, []) if own else []
            if whole:
                return parts[0][1]
            for piece, (_, part) in zip(own, parts, strict=True):
                buffer[piece.start : piece.stop] = part
            return buffer

        return take

    def _join(self, rows: Tensor, slices: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        """Put the tensor ranks' slices of ``rows`` together, on each of them; they differ by one row at most."""
        if not slices or not sum(slices):
            return rows
        longest = max(slices)
        padded = rows if len(rows) == longest else torch.cat([rows, rows.new_zeros(longest - len(rows), self._width)])
        joined = padded.new_empty(len(slices) * longest, self._width)
        dist.all_gather_single(joined, padded.contiguous(), group=group)
        if all(size == longest for size in slices):
            return joined
        return torch.cat([joined[index * longest :][:size] for index, size in enumerate(slices)])
