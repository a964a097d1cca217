"""Gradients on their way to the host: bounded buffers, most of which are filled during the backward pass.

A backward comes to the last layers first, a step to the first layers. Where there is no buffer for each piece, those of
the last layers have one, and go down while the backward still runs. All others share two: while one piece is stepped
the next is copied, and as both are filled when a backward ends, a step begins with what is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from mimo.topology.meshes import local
from mimo_optimizer_hybrid._buckets import Piece, Span
from mimo_optimizer_hybrid._lane import Lane, bytes_of, host_buffer
from mimo_optimizer_hybrid._tensors import sight

_SHARED = 2
"""Buffers that pieces take in turns."""


@attrs.frozen
class _Copied:
    """A gradient that was copied, and what `sight` saw of it then."""

    gradient: weakref.ref[Tensor]
    seen: tuple[int, int, int]


class Staging:
    """The staging buffers.

    The caller's thread fills each with the piece that comes first in it, while the other thread rests; that one fills
    a shared buffer again when it has stepped what was in it.

    Args:
        pieces: in the order in which they are stepped.
        most: elements of a buffer.
        buffers: how many there are, at most.
        device: of the gradients.
    """

    def __init__(self, pieces: Sequence[Piece], *, most: int, buffers: int, device: torch.device) -> None:
        self._pieces = tuple(pieces)
        count = min(buffers, len(pieces))
        self._buffers = host_buffer(most * count, device).view(-1, most)
        self._shared = min(_SHARED, count)
        self._first_own = len(pieces) - (count - self._shared)
        self._lane = Lane.of(device)
        self._events: list[torch.Event | None] = [None] * len(pieces)
        self._copied: dict[int, _Copied] = {}
        self._early: dict[int, list[tuple[int, Span]]] = {}
        self._whole = {span.parameter for piece in pieces for span in piece.spans}
        for number, piece in enumerate(pieces):
            for span in piece.spans:
                if self._is_first(number):
                    self._early.setdefault(span.parameter, []).append((number, span))
                else:
                    self._whole.discard(span.parameter)

    @property
    def ahead(self) -> int:
        """How many pieces are to be brought before the first is stepped; the next then takes the place of each."""
        return self._shared

    @property
    def bytes(self) -> int:
        """Host memory of the buffers."""
        return bytes_of(self._buffers)

    def view(self, number: int, span: Span) -> Tensor:
        """Return where the gradient of a span of piece ``number`` lies when it is staged."""
        is_own = number >= self._first_own
        buffer = self._shared + number - self._first_own if is_own else number % self._shared
        return self._buffers[buffer, span.at : span.at + span.stop - span.start]

    def _is_first(self, number: int) -> bool:
        """Return whether no other piece has been in its buffer before."""
        return number < self._shared or number >= self._first_own

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
        targets, sources = [], []
        for span in self._pieces[number].spans:
            fresh, flat = late.get(span.parameter, (True, None))
            if flat is not None and not (fresh and self._is_first(number)):
                targets.append(self.view(number, span))
                sources.append(flat[span.start : span.stop])
        if targets:
            self._lane.copy(targets, sources)
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
