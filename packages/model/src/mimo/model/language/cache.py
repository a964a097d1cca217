"""What a language model keeps of a sample whose rows come bit by bit, so that none is computed twice.

Each layer keeps what its later rows look at: attention keys and values, a convolution the last rows that it read, a
scan its state. All of it is this rank's: of the heads that it computes.
Shapes: T new rows, P rows kept of those that came before.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mimo.model.language.batch import LanguageBatch

_LEAST = 64
"""Rows for which there is room at least."""


@attrs.define(eq=False)
class Rows:
    """The last rows of those that came, one after the other in memory; room grows with them, by doubling.

    Args:
        most: kept at most between calls, None for all.

    Attributes:
        room: where they lie, at ``first`` to ``stop``.
    """

    most: int | None
    room: Tensor | None = attrs.field(default=None, init=False)
    first: int = attrs.field(default=0, init=False)
    stop: int = attrs.field(default=0, init=False)

    def extend(self, new: Tensor) -> Tensor:
        """Add rows [T, …], and return those kept before and these, [P + T, …]; the next call may overwrite them."""
        kept = self.stop - self.first
        if self.room is None or self.stop + len(new) > len(self.room):
            before, old = self.first, self.room
            if old is None or 2 * kept + len(new) > len(old):
                self.room = new.new_empty(max(_LEAST, 2 * (kept + len(new))), *new.shape[1:])
            assert self.room is not None
            if old is not None:  # what is kept is less than half of the room, and so never written over itself
                self.room[:kept] = old[before : before + kept]
            self.first, self.stop = 0, kept
        self.room[self.stop : self.stop + len(new)] = new
        self.stop += len(new)
        seen = self.room[self.first : self.stop]
        if self.most is not None:
            self.first = max(self.first, self.stop - self.most)
            if len(new) > _LEAST + 2 * self.most:  # a long beginning, of which little is looked at again
                self.room = seen[len(seen) - self.most :].clone()
                self.first, self.stop = 0, self.most
        return seen


@attrs.define(eq=False)
class LayerMemory:
    """What one layer keeps.

    Args:
        most: rows that are kept at most of those that grow, None for all.
        rows: that grow, by name.
        tensors: of one size, such as states, by name; whoever reads one replaces it.
    """

    most: int | None = None
    rows: dict[str, Rows] = attrs.field(factory=dict)
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Add rows [T, …], and return those kept before and these; see `Rows.extend`."""
        if name not in self.rows:
            self.rows[name] = Rows(self.most)
        return self.rows[name].extend(new)

    def follow(self, name: str, new: Tensor, rows: int) -> Tensor:
        """Return new rows [T, …] behind the last ``rows`` of those before, zeros where there were none; keep the last.

        As a causal convolution needs them.
        """
        before = self.tensors.get(name)
        if before is None:
            before = new.new_zeros(rows, *new.shape[1:])
        seen = torch.cat((before, new))
        self.tensors[name] = seen[len(new) :].clone()
        return seen


@attrs.define(eq=False)
class Memory:
    """What the layers of our language models keep of one sample, a `LanguageBatch.memory`.

    Args:
        most: rows before its own that a row of attention sees at most, None for all.
        seen: rows of the sample that all layers have read.
        layers: by name.
    """

    most: int | None = None
    seen: int = 0
    layers: dict[str, LayerMemory] = attrs.field(factory=dict)

    @classmethod
    def of(cls, batch: LanguageBatch) -> Memory | None:
        """Return what is kept of the one sample that a batch goes on with, if it does."""
        memory = batch.memory
        assert memory is None or isinstance(memory, Memory), "it was made by another model"
        assert memory is None or batch.lengths == (len(batch.tokens),), f"rows of one sample, not of {batch.lengths}"
        return memory

    def layer(self, name: str) -> LayerMemory:
        """Return what a layer keeps."""
        return self.layers.setdefault(name, LayerMemory(self.most))

    @property
    def held(self) -> int:
        """Rows whose keys and values are kept."""
        return self.seen if self.most is None else min(self.seen, self.most)

    @property
    def bytes(self) -> int:
        """How much is held."""
        held = [tensor for layer in self.layers.values() for tensor in layer.tensors.values()]
        held += [rows.room for layer in self.layers.values() for rows in layer.rows.values() if rows.room is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@runtime_checkable
class Remembering(Protocol):
    """A `LanguageModule` that can read a sample bit by bit: optional, without it the whole is read again each time."""

    def remember(self) -> object:
        """Return a new, empty ``LanguageBatch.memory``, for the rows of one sample.

        Forwards in which it is given read T further rows of the sample, and change it.
        """
