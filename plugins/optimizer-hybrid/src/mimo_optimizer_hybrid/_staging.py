"""Gradients on their way to the host: bounded buffers, of which the first are filled during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from mimo_optimizer_hybrid._buckets import Piece, Span
from mimo_optimizer_hybrid._lane import Lane, host_buffer
from mimo_optimizer_hybrid._tensors import local, sight


@attrs.frozen
class _Copied:
    """A gradient that was copied, and what `sight` saw of it then."""

    gradient: weakref.ref[Tensor]
    seen: tuple[int, int, int]


class Staging:
    """The staging buffers. Piece k uses buffer k modulo their number, so its order needs no agreement.

    The caller's thread fills buffers with the pieces that come first in each, while the other thread rests; that one
    fills a buffer again when it has stepped what was in it.

    Args:
        pieces: in the order in which they are stepped.
        most: numbers of a buffer.
        buffers: how many there are, at most.
        device: of the gradients.
    """

    def __init__(self, pieces: Sequence[Piece], *, most: int, buffers: int, device: torch.device) -> None:
        self._pieces = tuple(pieces)
        self._buffers = host_buffer(most * min(buffers, len(pieces)), device).view(-1, most)
        self._lane = Lane.of(device)
        self._events: list[torch.Event | None] = [None] * len(pieces)
        self._copied: dict[int, _Copied] = {}
        self._early: dict[int, list[tuple[int, Span]]] = {}
        self._whole = {span.parameter for piece in pieces for span in piece.spans}
        for number, piece in enumerate(pieces):
            for span in piece.spans:
                if number < self.depth:
                    self._early.setdefault(span.parameter, []).append((number, span))
                else:
                    self._whole.discard(span.parameter)

    @property
    def depth(self) -> int:
        """How many pieces are staged at once."""
        return len(self._buffers)

    @property
    def bytes(self) -> int:
        """Host memory of the buffers."""
        return self._buffers.untyped_storage().nbytes()

    def view(self, number: int, span: Span) -> Tensor:
        """Return where the gradient of a span of piece ``number`` lies when it is staged."""
        return self._buffers[number % self.depth, span.at : span.at + span.stop - span.start]

    def stage(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Copy gradients that are final down, as far as there are buffers.

        Args:
            gradients: by parameter.
        """
        self._lane.follow()
        touched: set[int] = set()
        for index, gradient in gradients.items():
            self._copied.pop(index, None)
            if gradient is None or index not in self._early:
                continue
            flat = local(gradient).reshape(-1)
            for number, span in self._early[index]:
                self._lane.copy([self.view(number, span)], [flat[span.start : span.stop]])
                touched.add(number)
            self._lane.keep([flat])
            self._copied[index] = _Copied(weakref.ref(gradient), sight(gradient))
        self._mark(touched)

    def take(self, index: int, gradient: Tensor) -> tuple[bool, Tensor | None]:
        """Begin a step of a parameter.

        Returns:
            Whether what is staged of it is this gradient as it is now, and the gradient [n] if any of it is yet to be
            copied.
        """
        copied = self._copied.pop(index, None)
        fresh = copied is not None and copied.gradient() is gradient and copied.seen == sight(gradient)
        if fresh and index in self._whole:
            return True, None
        flat = local(gradient).reshape(-1)
        self._lane.keep([flat])
        return fresh, flat

    def follow(self) -> None:
        """Let what `bring` copies come after all that the device has been given by this thread."""
        self._lane.follow()

    def bring(self, number: int, late: Mapping[int, tuple[bool, Tensor | None]]) -> None:
        """Copy down what of a piece is not there, by what `take` has returned of its parameters."""
        for span in self._pieces[number].spans:
            fresh, flat = late.get(span.parameter, (True, None))
            if flat is not None and not (fresh and number < self.depth):
                self._lane.copy([self.view(number, span)], [flat[span.start : span.stop]])
        self._mark([number])

    def wait(self, number: int) -> None:
        """Wait until a piece is there."""
        event = self._events[number]
        if event is not None:
            event.synchronize()

    def _mark(self, numbers: Iterable[int]) -> None:
        event = self._lane.mark()
        for number in numbers:
            self._events[number] = event
