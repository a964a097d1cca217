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
    def places(self) -> tuple[Tensor | None, Tensor]:
        """Which of the T rows are saved, None for all, and the places that they take among those of all sequences."""
        if self.is_single:
            places = [i * self.capacity + before % self.capacity for i, before in enumerate(self.before)]
            return None, torch.tensor(places, device=self.device)
        rows, taken, start = list[Tensor](), list[Tensor](), 0
        for sequence, (length, before) in enumerate(zip(self.lengths, self.before, strict=True)):
            saved = min(length, self.capacity)
            rows.append(torch.arange(start + length - saved, start + length))
            at = torch.arange(before + length - saved, before + length) % self.capacity
            taken.append(at + sequence * self.capacity)
            start += length
        everything = sum(map(len, rows)) == start
        return None if everything else torch.cat(rows).to(self.device), torch.cat(taken).to(self.device)

    @cached_property
    def earlier(self) -> tuple[Tensor, Tensor]:
        """Where the rows lie that new ones read beside each other, and the order that joins them with these.

        Joined, each sequence that has new rows has its held ones, and then these.
        """
        places, order, start = list[Tensor](), list[Tensor](), 0
        total = sum(held for held, length in zip(self.held, self.lengths, strict=True) if length)
        seen = 0
        for sequence, (length, before, held) in enumerate(zip(self.lengths, self.before, self.held, strict=True)):
            if length:
                places.append(torch.arange(before - held, before) % self.capacity + sequence * self.capacity)
                order += [torch.arange(seen, seen + held), torch.arange(total + start, total + start + length)]
                seen, start = seen + held, start + length
        return torch.cat(places).to(self.device), torch.cat(order).to(self.device)

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
