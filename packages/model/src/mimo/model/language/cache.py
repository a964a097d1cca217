"""The decode cache: what a language model saves of sequences whose rows arrive piece by piece, to compute none twice.

Each layer saves what its later rows read: attention its keys and values (the KV cache), a convolution the last rows of
its input, a scan its state. All of it is this rank's: of the heads that it computes.
Shapes: C sequences, T new rows of all of them, P cached rows from before, L rows in which those of a sequence lie, K
heads of D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mimo.model.attention import CacheStep, Segments, SequenceRun, Spans, grown, moves
from mimo.model.graphs import ForGraphs
from mimo.model.language.batch import LanguageBatch

_BLOCK = 64
"""Room is made for a multiple of so many rows."""


@attrs.define(eq=False)
class LayerCache(ForGraphs):
    """What one layer saves.

    Args:
        cache: of all layers.
        rows: rows that accumulate, by name: [sequences, heads, capacity, columns].
        tensors: tensors of one size for each sequence, such as states, by name: [sequences, …].
    """

    cache: DecodeCache
    rows: dict[str, Tensor] = attrs.field(factory=dict)
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def for_graphs(self) -> None:
        """Have a layer that reads it run eagerly: it changes, and grows."""

    @property
    def runs(self) -> tuple[SequenceRun, ...]:
        """The sequences that the forward has rows of."""
        return self.cache.step.runs

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Save rows [T, K, D], and return what they read, as the segments of the forward take it.

        Returns:
            Of single rows all places of the sequences, [C, K, L, D], which the next call overwrites; else the cached
            rows and the new ones of each sequence in turn, [P + T, K, D].
        """
        step, heads = self.cache.step, new.shape[1]
        buffer = self._room(name, new)
        flat, found = buffer.flatten(0, 2), new
        if not (step.is_single or step.is_first):
            earlier = flat[step.earlier(heads)].view(-1, *new.shape[1:])
            found = torch.cat((earlier, new))[step.order]
        saved = new if step.saved is None else new[step.saved]
        flat.index_copy_(0, step.places(heads), saved.flatten(0, 1))
        return buffer[: len(step.lengths), :, : step.padded] if step.is_single else found

    def follow(self, name: str, new: Tensor, rows: int) -> Iterator[Tensor]:
        """Yield for each of `runs` its new rows behind the last ``rows`` before them, [C, rows + T, …]; saves the last.

        As a causal convolution needs them; before the first row there are zeros.
        """
        last = self.state(name, (rows, *new.shape[1:]), new)
        for run in self.runs:
            own = new[run.span].unflatten(0, (run.count, run.rows))
            joined = torch.cat((last[run.sequences], own), 1)
            last[run.sequences] = joined[:, run.rows :]
            yield joined

    def state(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor of each sequence, [C, *shape], to be changed in place; zeros where it begins.

        Args:
            name: of the tensor.
            shape: of one sequence's.
            like: has its type and device.
        """
        found = self.tensors.get(name)
        missing = len(self.cache.step.lengths) - (0 if found is None else len(found))
        if missing:
            begun = like.new_zeros(missing, *shape)
            self.tensors[name] = begun if found is None else torch.cat((found, begun))
        return self.tensors[name]

    def keep(self, sequences: Sequence[int]) -> None:
        """Hold these sequences alone, in this order."""
        targets, sources = moves(sequences)
        if targets:
            for buffer in self.rows.values():
                buffer[targets] = buffer[sources]
        self.tensors = {name: tensor[list(sequences)] for name, tensor in self.tensors.items()}

    def _room(self, name: str, new: Tensor) -> Tensor:
        """Return where the rows of a name are saved, made large enough."""
        old, room = self.rows.get(name), (self.cache.sequences, new.shape[1], self.cache.step.capacity)
        if old is None or old.shape[:3] != room:
            # What no row has yet is masked, and must be finite; the rows of a head, which are read together, are too.
            self.rows[name] = new.new_zeros(*room, new.shape[2])
            if old is not None:
                self.rows[name][: old.shape[0], :, : old.shape[2]] = old
        return self.rows[name]


@attrs.define(eq=False)
class DecodeCache:
    """What the layers of our language models save of some sequences, a `LanguageBatch.decode_cache`.

    Room for rows is made in blocks, of the same number for each sequence; what ended gives its room to what begins.

    Args:
        max_rows: rows before its own that a row of attention reads at most, None for all.
        seen: rows of each sequence that all layers have read.
        layers: by name.
        sequences: for how many there is room.
    """

    max_rows: int | None = None
    seen: tuple[int, ...] = ()
    layers: dict[str, LayerCache] = attrs.field(factory=dict)
    sequences: int = 0
    _capacity: int = attrs.field(default=0, init=False)
    _step: CacheStep | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, batch: LanguageBatch, *, items: Sequence[Spans] = ()) -> DecodeCache | None:
        """Return the cache whose sequences a batch continues, ready for its rows; None if it continues none.

        When all layers have read them, call `end`.

        Args:
            batch: that may continue some.
            items: of each sequence, or none: its items, as in `LanguageBatch.items`, where rows of one see each other.
        """
        cache = batch.decode_cache
        if cache is None:
            return None
        assert isinstance(cache, DecodeCache), "it was made by another model"
        assert sum(batch.lengths) == len(batch.tokens), "without padding"
        cache.begin(batch.lengths, batch.tokens.device, items)
        return cache

    def begin(self, lengths: tuple[int, ...], device: torch.device, items: Sequence[Spans] = ()) -> None:
        """Make ready for a forward with so many rows of each sequence; see `of`."""
        assert len(lengths) >= len(self.seen), f"rows of {len(lengths)} sequences, of {len(self.seen)} that are cached"
        before = (*self.seen, *(0,) * (len(lengths) - len(self.seen)))
        for spans, first, rows in zip(items, before, lengths, strict=bool(items)):
            cut = [span for span in spans for end in (first, first + rows) if span[0] < end < span[1]]
            assert not cut, f"rows {first} .. {first + rows} of a sequence, which cut its item of rows {cut[0]}"
        longest = max((sum(each) for each in zip(before, lengths, strict=True)), default=0)
        limit = None if self.max_rows is None else self.max_rows + 1
        self._capacity = grown(self._capacity, longest, block=_BLOCK, limit=limit)
        self.sequences = max(self.sequences, len(lengths))
        self._step = CacheStep(
            lengths=lengths,
            before=before,
            max_rows=self.max_rows,
            capacity=self._capacity,
            device=device,
            items=items,
        )

    @property
    def step(self) -> CacheStep:
        """The rows of the forward that runs."""
        assert self._step is not None
        return self._step

    def end(self) -> None:
        """Count the rows of the forward as read."""
        self.seen = tuple(sum(each) for each in zip(self.step.before, self.step.lengths, strict=True))

    def keep(self, sequences: Sequence[int]) -> None:
        """Hold these sequences alone from now on, in this order; those that come next are new ones.

        Cheapest where few change their place: let the last take that of one that has ended.
        """
        for layer in self.layers.values():
            layer.keep(sequences)
        self.seen = tuple(self.seen[sequence] for sequence in sequences)

    def layer(self, name: str) -> LayerCache:
        """Return the cache of one layer."""
        if name not in self.layers:
            self.layers[name] = LayerCache(self)
        return self.layers[name]

    def segments(self, window: int = 0) -> Segments:
        """Return where the sequences of the forward lie; see `CacheStep.segments`."""
        return self.step.segments(window)

    @property
    def bytes(self) -> int:
        """Size of all its tensors."""
        held = [tensor for layer in self.layers.values() for tensor in (*layer.tensors.values(), *layer.rows.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class SequenceCache(Protocol):
    """What `LanguageBatch.decode_cache` is: the caches of some sequences, in the order of a batch's samples."""

    def keep(self, sequences: Sequence[int]) -> None:
        """Hold these sequences alone from now on, in this order; samples beyond them begin new ones."""


@runtime_checkable
class SupportsDecodeCache(Protocol):
    """A `LanguageModule` that can read samples piece by piece; without it generation reads all the text each time."""

    def new_decode_cache(self) -> SequenceCache:
        """Return a new, empty ``LanguageBatch.decode_cache``.

        Forwards that are given it read more rows of its sequences, and update it.
        """
