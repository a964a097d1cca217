"""The decode cache: what a language model saves of a sample whose rows arrive piece by piece, to compute none twice.

Each layer saves what its later rows read: attention its keys and values (the KV cache), a convolution the last rows of
its input, a scan its state. All of it is this rank's: of the heads that it computes.
Shapes: T new rows, P cached rows from before.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mimo.model.language.batch import LanguageBatch

_MIN_ROWS = 64
"""Rows that are allocated at least."""


@attrs.define(eq=False)
class CachedRows:
    """The last rows of those that arrived, in one buffer that grows by doubling.

    Args:
        max_rows: saved at most between calls, None for all.

    Attributes:
        buffer: holds them at ``first`` to ``stop``.
    """

    max_rows: int | None
    buffer: Tensor | None = attrs.field(default=None, init=False)
    first: int = attrs.field(default=0, init=False)
    stop: int = attrs.field(default=0, init=False)

    def extend(self, new: Tensor) -> Tensor:
        """Add rows [T, …], and return the cached ones and these, [P + T, …]; the next call may overwrite them."""
        count = self.stop - self.first
        if self.buffer is None or self.stop + len(new) > len(self.buffer):
            start, old = self.first, self.buffer
            if old is None or 2 * count + len(new) > len(old):
                self.buffer = new.new_empty(max(_MIN_ROWS, 2 * (count + len(new))), *new.shape[1:])
            assert self.buffer is not None
            if old is not None:  # the saved rows fill less than half of the buffer, so source and target never overlap
                self.buffer[:count] = old[start : start + count]
            self.first, self.stop = 0, count
        self.buffer[self.stop : self.stop + len(new)] = new
        self.stop += len(new)
        rows = self.buffer[self.first : self.stop]
        if self.max_rows is not None:
            self.first = max(self.first, self.stop - self.max_rows)
            if len(new) > _MIN_ROWS + 2 * self.max_rows:  # a long prompt, of which little is read again
                self.buffer = rows[len(rows) - self.max_rows :].clone()
                self.first, self.stop = 0, self.max_rows
        return rows


@attrs.define(eq=False)
class LayerCache:
    """What one layer saves.

    Args:
        max_rows: saved at most of rows that accumulate, None for all.
        rows: rows that accumulate, by name.
        tensors: tensors of one size, such as states, by name; whoever reads one replaces it.
    """

    max_rows: int | None = None
    rows: dict[str, CachedRows] = attrs.field(factory=dict)
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Add rows [T, …], and return the cached ones and these; see `CachedRows.extend`."""
        if name not in self.rows:
            self.rows[name] = CachedRows(self.max_rows)
        return self.rows[name].extend(new)

    def follow(self, name: str, new: Tensor, rows: int) -> Tensor:
        """Return new rows [T, …] behind the last ``rows`` before them (zeros at first), and save the last of all.

        As a causal convolution needs them.
        """
        before = self.tensors.get(name)
        if before is None:
            before = new.new_zeros(rows, *new.shape[1:])
        joined = torch.cat((before, new))
        self.tensors[name] = joined[len(new) :].clone()
        return joined


@attrs.define(eq=False)
class DecodeCache:
    """What the layers of our language models save of one sample, a `LanguageBatch.decode_cache`.

    Args:
        max_rows: rows before its own that a row of attention reads at most, None for all.
        seen: rows of the sample that all layers have read.
        layers: by name.
    """

    max_rows: int | None = None
    seen: int = 0
    layers: dict[str, LayerCache] = attrs.field(factory=dict)

    @classmethod
    def of(cls, batch: LanguageBatch) -> DecodeCache | None:
        """Return the cache of the one sample that a batch continues; None if it continues none."""
        cache = batch.decode_cache
        assert cache is None or isinstance(cache, DecodeCache), "it was made by another model"
        assert cache is None or batch.lengths == (len(batch.tokens),), f"rows of one sample, not of {batch.lengths}"
        return cache

    def layer(self, name: str) -> LayerCache:
        """Return the cache of one layer."""
        return self.layers.setdefault(name, LayerCache(self.max_rows))

    @property
    def held(self) -> int:
        """Rows whose keys and values are cached."""
        return self.seen if self.max_rows is None else min(self.seen, self.max_rows)

    @property
    def bytes(self) -> int:
        """Size of all its tensors."""
        tensors = [tensor for layer in self.layers.values() for tensor in layer.tensors.values()]
        buffers = [rows.buffer for layer in self.layers.values() for rows in layer.rows.values()]
        held = [*tensors, *(buffer for buffer in buffers if buffer is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@runtime_checkable
class SupportsDecodeCache(Protocol):
    """A `LanguageModule` that can read a sample piece by piece; without it generation reads all the text each time."""

    def new_decode_cache(self) -> object:
        """Return a new, empty ``LanguageBatch.decode_cache``, for the rows of one sample.

        Forwards that are given it read T more rows of the sample, and update it.
        """
