"""What a stage of an encoder does in a plan: items in, rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mimo.data import PlacedItem
from mimo.hooks import RunError
from mimo.topology import Coordinates
from mimo.topology.device_copies import to_device
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.row_layout import held_rows
from mimo.trainer.items.prepared import Item
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.step.programs.item_program import ItemProgram

_ITEMS_SHOWN = 4


class EncoderProgram(ItemProgram):
    """A stage of an encoder: items in, rows out."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Encode the items of this lane."""
        batches = [self._microbatches[microbatch] for microbatch in microbatches]
        prepared = self._prepare(batches)
        with self.part.drawing(items=self._item_keys(microbatches)):
            rows, items = self._encode(batches, prepared, inputs)
        self._sums_of(microbatches).rows += self._count(items)
        return self._sent(batches, self._recorded(microbatches, inputs, rows))

    def _sent(self, batches: Sequence[Microbatch], rows: Tensor) -> dict[str, Tensor]:
        """Return the rows of a pass by edge."""
        found = self._outputs(rows)
        for edge in self._edges:
            if self.job.sends_some(edge):
                taker = self.job.module(edge.target.module)
                sent = np.concatenate([batch.sent_rows(self.module, taker, self.place.dp) for batch in batches])
                held, _ = held_rows(self.module, self.place, len(sent))
                own = torch.from_numpy(np.flatnonzero(sent[held.start : held.stop]))
                found[edge.name] = found[edge.name].index_select(0, to_device(own, self.device))
        return found

    def _count(self, items: Sequence[PlacedItem]) -> int:
        """Return how many rows of items this rank, and none that holds the same or a part of them, counts."""
        counts = self.part.stage.is_last and self.place.tp == 0 and self.place.cp == 0
        return sum(item.rows for item in items) if counts else 0

    def _encode(
        self, batches: Sequence[Microbatch], prepared: Sequence[Item], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[PlacedItem]]:
        """Return this rank's rows of a pass, and the items that they are of."""
        items = [item for batch in batches for item in batch.items(self.module, self.place.dp)]
        hidden = next(iter(inputs.values()), None)
        rows = self.part.encode(prepared, [item.info.size for item in items], hidden)
        if self.part.stage.is_last:
            rows = take_rows(self.job, self.module, items, rows, self.place)
            rows = without_broken(self.module, items, rows, self.place)
        return rows, items


def take_rows(
    job: Job, module: JobModule, items: Sequence[PlacedItem], rows: Tensor, place: Coordinates | None = None
) -> Tensor:
    """Return an encoder's rows without padding.

    Args:
        job: the whole.
        module: the encoder.
        items: that it read.
        rows: what its last stage returned: all rows of the items, or its slice of them.
        place: where this rank stands in the module's grid; None where it is alone.

    Raises:
        RunError: it returned another number of rows than it said; modality, samples and both counts are named.
    """
    total = sum(item.rows for item in items)
    held, padded = (range(total), total) if place is None else held_rows(module, place, total)
    width = job.row_width(module)
    if tuple(rows.shape) != (padded, width):
        counts = ", ".join(
            f"{item.rows} for item {item.info.index} of sample {item.info.sample} of size {item.info.size}"
            for item in items[:_ITEMS_SHOWN]
        ) + (", ..." if len(items) > _ITEMS_SHOWN else "")
        raise RunError(
            f"modules.{module.name}",
            expected=f"{padded} rows of width {width} for {len(items)} items of modality {module.modality!r}, "
            f"one for each of their placeholders, as rows() of encoder {module.spec.name!r} said ({counts})",
            got=f"a tensor of shape {tuple(rows.shape)} from its forward()",
            fix="Make them agree.",
        )
    return rows[: len(held)]


def without_broken(module: JobModule, items: Sequence[PlacedItem], rows: Tensor, place: Coordinates) -> Tensor:
    """Return the rows that a rank holds with zeros for those of items that can't be decoded, which get no gradient."""
    if not any(item.is_broken for item in items):
        return rows
    total = sum(item.rows for item in items)
    held, _ = held_rows(module, place, total)
    broken = torch.tensor([item.is_broken for item in items]).repeat_interleave(
        torch.tensor([item.rows for item in items])
    )
    return rows.masked_fill(to_device(broken[held.start : held.stop, None], rows.device), 0)
