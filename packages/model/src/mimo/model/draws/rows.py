"""What the draws of a stage are keyed by while it computes: a key for each row, and for each item.

`build_part` hands one `DrawKeys` to all parts of a stage that draw. Whoever runs the stage puts the keys of a
microbatch in it; a stage that computes with several sets of rows says of which they are while it does.
Shapes: T rows of this context rank, t tensor ranks, N items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mimo.hooks import PluginError
from mimo.model.draws.numbers import fold, key_of
from mimo.model.parallel import Dispatch, TensorAxis
from mimo.topology.device_copies import to_device

ROW, ITEM = 0, 1
"""Columns of keys [T, 2]: of the row, and of the item or sample that it is of."""


def step_key(seed: int, step: int) -> Tensor:
    """Return the key of a step, a scalar on the CPU."""
    return key_of(seed, step)


def sample_rows(step: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Return the keys [T, 2] of rows of a language model.

    Args:
        step: of `step_key`.
        samples: [T] number of each row's sample in the dataset.
        positions: [T] of each row in it.
    """
    owners = fold(fold(step, samples), 0)
    return torch.stack((fold(owners, positions), owners), 1)


def item_keys(step: Tensor, samples: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Return the keys [N] of items of an encoder, on the CPU; they are others than those of the samples around them.

    Args:
        step: of `step_key`.
        samples: number of each item's sample in the dataset.
        indices: of each item in it.
    """
    of_samples, places = (torch.tensor(numbers, dtype=torch.int64) for numbers in (samples, indices))
    return fold(fold(step, of_samples), places + 1)


@attrs.frozen(eq=False)
class Drawn:
    """Keys at one moment.

    Args:
        rows: [T, 2] of the rows, None where nothing is drawn.
        items: [N] of the items that an encoder's stage reads, on the CPU; None where nothing is drawn.
        is_stacked: whether rows are of these items one after the other, equally many of each, however they are counted.
    """

    rows: Tensor | None = None
    items: Tensor | None = None
    is_stacked: bool = False


@attrs.define(eq=False, kw_only=True, slots=False)  # a graph that sets its rows knows no slots
class DrawKeys:
    """The keys by which a stage draws now; without any it draws nothing, as in evaluation.

    Args:
        module: name of the module, for errors.
        axis: over whose ranks, with sequence parallelism, rows are split.

    Attributes:
        rows: those of now, as in `Drawn`.
        items: likewise.
        is_stacked: likewise.
        is_read: whether anything draws by them; `attach_draws` says it.
    """

    module: str = ""
    axis: TensorAxis = attrs.field(factory=TensorAxis.single)
    rows: Tensor | None = attrs.field(default=None, init=False)
    items: Tensor | None = attrs.field(default=None, init=False)
    is_stacked: bool = attrs.field(default=False, init=False)
    is_read: bool = attrs.field(default=False, init=False)
    _calls: dict[object, int] = attrs.field(factory=dict, init=False)

    @property
    def now(self) -> Drawn:
        """The keys of now."""
        return Drawn(self.rows, self.items, self.is_stacked)

    @contextmanager
    def at(self, drawn: Drawn) -> Iterator[None]:
        """Draw by these keys within."""
        before, calls = self.now, self._calls
        self._set(drawn)
        self._calls = {}
        try:
            yield
        finally:
            self._set(before)
            self._calls = calls

    def count_call(self, layer: object) -> int:
        """Return how often a layer has been called with the keys of now, for one that serves in several places."""
        self._calls[layer] = self._calls.get(layer, -1) + 1
        return self._calls[layer]

    def _set(self, drawn: Drawn) -> None:
        self.rows, self.items, self.is_stacked = drawn.rows, drawn.items, drawn.is_stacked

    def on(self, rows: Tensor | None) -> Drawn:
        """Return the keys of now with those of other rows [T, 2]."""
        return Drawn(rows, self.items)

    def chosen(self, index: Tensor) -> Drawn:
        """Return the keys of now with those of some of the rows, [n]."""
        return self.now if self.rows is None else self.on(self.rows.index_select(0, index))

    def some(self, span: slice) -> Drawn:
        """Return the keys of now with those of a span of the rows."""
        return self.now if self.rows is None else self.on(self.rows[span])

    def sent(self, dispatch: Dispatch, chosen: Tensor) -> Drawn:
        """Return the keys of now with those of the rows that `Dispatch.send` returned, others for each expert of a row.

        They travel as the rows do: all ranks call it, or none. Without keys nothing is sent.

        Args:
            dispatch: the ways of the rows of now.
            chosen: [n, k] the experts of each.
        """
        if self.rows is None:
            return self.now
        return self.on(dispatch.send_each(fold(self.rows.unsqueeze(1), chosen.unsqueeze(2))))

    def parts(self, counts: Sequence[int]) -> Drawn:
        """Return the keys of now, each item as so many of its own: the tiles of an image."""
        if self.items is None:
            return self.now
        each = torch.tensor(counts, dtype=torch.int64)
        inside = torch.cat([torch.arange(0), *map(torch.arange, counts)])
        return attrs.evolve(self.now, items=fold(self.items.repeat_interleave(each), inside))

    def packed(self, lengths: Sequence[int], held: range | Tensor | None = None, *, device: torch.device) -> Drawn:
        """Return the keys of now with those of rows that lie packed, item after item.

        Args:
            lengths: rows of each item.
            held: which of all these rows are here, those beyond the end being padding; or the number of each, on the
                CPU; None for all, in order.
            device: where the rows are.

        Raises:
            PluginError: there are not as many items.
        """
        items = self.items
        if items is None:
            return self.now
        if len(items) != len(lengths):
            raise self._error(f"the rows of {len(items)} items, as many as it was given", f"{len(lengths)}")
        owners = items.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        inside = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
        rows = torch.stack((fold(owners, inside), owners), 1)
        if isinstance(held, Tensor):
            rows = rows[held]
        elif held is not None:
            mine = rows[held.start : held.stop]
            rows = torch.cat((mine, rows.new_zeros(len(held) - len(mine), 2)))
        return self.on(to_device(rows, device))

    def stacked(self, device: torch.device | str) -> Drawn:
        """Return the keys of now for items that lie stacked, [N, …], equally many rows of each."""
        items = self.items
        return self.now if items is None else Drawn(items=to_device(items, device), is_stacked=True)

    def of(self, x: Tensor) -> Tensor | None:
        """Return the keys of the rows of ``x`` [..., F], as many as it has when all dims but the last are flattened.

        Those of a microbatch, or with sequence parallelism this tensor rank's slice of them. None: nothing is drawn.

        Raises:
            PluginError: they are other rows.
        """
        count, rows, axis = x.shape[:-1].numel(), self.rows, self.axis
        if self.is_stacked:
            return self._stacked(count)
        if rows is None:
            if self.items is None:
                return None
            raise self._error("rows of which it has said what they are (DrawKeys.packed)", f"{count} others")
        if count == rows.shape[0]:
            return rows
        if axis.splits_rows and count * axis.size == rows.shape[0]:
            return rows[axis.rank * count : (axis.rank + 1) * count]
        raise self._error(f"{rows.shape[0]} rows, of which it has said what they are", f"{count} others")

    def check_stacked(self, x: Tensor) -> None:
        """Refuse what isn't [N, …], where items lie stacked.

        Raises:
            PluginError: it is something else.
        """
        assert self.items is not None
        if len(x) != len(self.items):
            raise self._error(f"{len(self.items)} items one above the other", f"{len(x)}")

    def _stacked(self, count: int) -> Tensor:
        items = self.items
        assert items is not None
        each, rest = divmod(count, max(len(items), 1))
        if rest or (count and not len(items)):
            raise self._error(f"as many rows of each of {len(items)} items", f"{count}")
        owners = items.repeat_interleave(each, output_size=count) if count else items[:0]
        inside = torch.arange(count, device=items.device) % max(each, 1)
        return torch.stack((fold(owners, inside), owners), 1)

    def _error(self, expected: str, got: str) -> PluginError:
        return PluginError(
            f"modules.{self.module}.plugin",
            expected=f"random draws in a layer over {expected}",
            got=got,
            fix="Set the rates of its dropout, those of lora too, to 0, or have it say what its rows are: see "
            "docs/write-an-encoder.md.",
        )


@runtime_checkable
class ReadsDrawKeys(Protocol):
    """A submodule that reads or sets the keys of its stage: `build_part` gives it those that the stage has."""

    draw_keys: DrawKeys
