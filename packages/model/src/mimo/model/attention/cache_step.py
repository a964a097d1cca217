"""Which rows of which cached sequences one forward reads, and where the cache has them.

Worked out once for a forward, it serves all layers. Shapes: C sequences, T new rows of all of them, L rows in which
each sequence's cached rows lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from mimo.model.attention.chunks import Spans
from mimo.model.attention.segments import Segments
from mimo.topology.device_copies import to_device


@attrs.frozen
class SequenceRun:
    """``count`` sequences from ``first`` on, of which a forward has ``rows`` rows each, from row ``start`` of T on."""

    first: int
    count: int
    start: int
    rows: int

    @property
    def sequences(self) -> slice:
        """Which sequences they are."""
        return slice(self.first, self.first + self.count)

    @property
    def span(self) -> slice:
        """Which rows of T are theirs."""
        return slice(self.start, self.start + self.count * self.rows)


@attrs.define(eq=False, kw_only=True, slots=False)
class CacheStep:
    """The rows of one forward.

    Args:
        lengths: new rows of each sequence, 0 for one that waits.
        before: rows of each that came before.
        max_rows: rows before its own that a row of attention reads at most, None for all.
        capacity: rows of each sequence that there is room for; a later row takes the place of that so many before it.
        device: where the rows are.
        items: of each sequence, or none: the rows of its items, each of which sees all of its item; none lies in part
            among the new rows.
    """

    lengths: tuple[int, ...]
    before: tuple[int, ...]
    max_rows: int | None
    capacity: int
    device: torch.device
    items: Sequence[Spans] = ()
    _segments: dict[int, Segments] = attrs.field(factory=dict, init=False)
    _places: dict[int, Tensor] = attrs.field(factory=dict, init=False)

    @cached_property
    def is_single(self) -> bool:
        """Whether it has one row of every sequence."""
        return all(length == 1 for length in self.lengths)

    @cached_property
    def is_first(self) -> bool:
        """Whether no row of a sequence that has some came before."""
        return not any(before for before, length in zip(self.before, self.lengths, strict=True) if length)

    @cached_property
    def runs(self) -> tuple[SequenceRun, ...]:
        """The sequences that have rows: those of one row that follow one another together, others one by one."""
        found: list[SequenceRun] = []
        start = 0
        for sequence, rows in enumerate(self.lengths):
            last = found[-1] if found else None
            if last is not None and rows == last.rows == 1 and last.sequences.stop == sequence:
                found[-1] = attrs.evolve(last, count=last.count + 1)
            elif rows:
                found.append(SequenceRun(sequence, 1, start, rows))
            start += rows
        return tuple(found)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each sequence that has new ones, these included, whether or not all are still cached."""
        return [before + length for before, length in zip(self.before, self.lengths, strict=True) if length]

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Rows of each sequence before the new ones that are still cached and may be read."""
        most = max(self.before, default=0) if self.max_rows is None else self.max_rows
        return tuple(min(before, most) for before in self.before)

    @cached_property
    def padded(self) -> int:
        """L of a forward of single rows: the new ones are among them."""
        return min(self.capacity, max(self.before, default=0) + 1)

    @cached_property
    def saved(self) -> Tensor | None:
        """Which of the T rows are saved, None for all: those that no later one of them takes the place of."""
        if all(length <= self.capacity for length in self.lengths):
            return None
        rows, start = list[Tensor](), 0
        for length in self.lengths:
            rows.append(torch.arange(start + max(0, length - self.capacity), start + length))
            start += length
        return to_device(torch.cat(rows), self.device)

    def places(self, heads: int) -> Tensor:
        """Return the places that the heads of saved rows take among [sequences, heads, capacity]: row by row."""
        if heads not in self._places:
            spans = [
                (sequence, max(before, before + length - self.capacity), before + length)
                for sequence, (length, before) in enumerate(zip(self.lengths, self.before, strict=True))
            ]
            self._places[heads] = self._index(spans, heads)
        return self._places[heads]

    def earlier(self, heads: int) -> Tensor:
        """Return the places of the rows that new ones read beside each other, likewise."""
        spans = [
            (sequence, before - held, before)
            for sequence, (length, before, held) in enumerate(zip(self.lengths, self.before, self.held, strict=True))
            if length
        ]
        return self._index(spans, heads)

    @cached_property
    def order(self) -> Tensor:
        """The order that joins earlier rows with the new ones behind them: of each sequence those, and then these."""
        order, seen, start = list[Tensor](), 0, 0
        total = sum(held for held, length in zip(self.held, self.lengths, strict=True) if length)
        for length, held in zip(self.lengths, self.held, strict=True):
            if length:
                order += [torch.arange(seen, seen + held), torch.arange(total + start, total + start + length)]
                seen, start = seen + held, start + length
        return to_device(torch.cat(order), self.device)

    def _index(self, spans: Sequence[tuple[int, int, int]], heads: int) -> Tensor:
        """Return the places of rows of sequences, from one to another, as each head's."""
        if all(stop - start == 1 for _, start, stop in spans):
            found = [sequence * heads * self.capacity + at % self.capacity for sequence, at, _ in spans]
            rows = torch.tensor(found, dtype=torch.long)
        else:
            pieces = (
                torch.arange(start, stop) % self.capacity + sequence * heads * self.capacity
                for sequence, start, stop in spans
            )
            rows = torch.cat([torch.arange(0), *pieces])
        return to_device((rows.unsqueeze(1) + torch.arange(heads) * self.capacity).flatten(), self.device)

    def segments(self, window: int = 0) -> Segments:
        """Return where the sequences lie, for layers whose rows see at most ``window`` rows; 0 for all.

        The keys of its calls are what `LayerCache.extend` returns.
        """
        if window not in self._segments:
            self._segments[window] = self._cut(window)
        return self._segments[window]

    def _cut(self, window: int) -> Segments:
        if self.is_single:
            held = [min(before + 1, self.padded) for before in self.before]
            sees = window if self.max_rows is None else 0  # else no more are cached
            return Segments.single_rows(held, keys=self.padded, window=sees, device=self.device)
        if self.is_first:
            return Segments.of(self.lengths, causal=True, window=window, device=self.device, items=self.items)
        items = [
            [(low - before + held, high - before + held) for low, high in spans]
            for spans, before, held in zip(self.items, self.before, self.held, strict=bool(self.items))
        ]
        return Segments.continued(self.lengths, before=self.held, window=window, device=self.device, items=items)


def grown(capacity: int, rows: int, *, block: int, limit: int | None) -> int:
    """Return for how many rows of a sequence to make room, where there must be some for ``rows``.

    Args:
        capacity: for how many there is.
        rows: that the longest sequence has.
        block: what it is a multiple of.
        limit: rows that are ever read, None for all.
    """
    needed = rows if limit is None else min(rows, limit)
    if needed <= capacity:
        return capacity
    room = -(-max(needed, capacity + capacity // 2) // block) * block
    return room if limit is None else min(room, limit)


def moves(sequences: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return to which places sequences move, and from which, where those of ``sequences`` alone stay in this order."""
    pairs = [(target, source) for target, source in enumerate(sequences) if target != source]
    return [target for target, _ in pairs], [source for _, source in pairs]
