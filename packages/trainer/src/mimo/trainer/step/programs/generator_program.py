"""What a stage of a generator does in a plan: rows of what feeds it in, losses of the items that it is to make out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mimo.hooks import RunError
from mimo.model import GeneratorSpec
from mimo.model.runtime import ContextAxis, PackedRows, item_keys, step_key
from mimo.schedule import PlanPhase
from mimo.schedule.runtime import LOSS
from mimo.topology.device_copies import to_device
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.row_layout import held_rows, is_sliced
from mimo.trainer.job.job import JobModule
from mimo.trainer.step.programs.item_program import ItemProgram
from mimo.trainer.step.programs.loss_terms import loss_factor, loss_name, target_counts, targets_name
from mimo.trainer.step.programs.program import NumberedData

_NO_STEP = 0
"""By what number noise is drawn in evaluation, so that it is the same each time; steps count from 1."""


class GeneratorProgram(ItemProgram):
    """A stage of a generator: rows of the language model and of its own encoders in, losses out."""

    def begin(
        self,
        data: NumberedData,
        *,
        scores: bool,
        following: NumberedData | None = None,
        phase: PlanPhase = "both",
    ) -> None:
        """Take the samples of the step to come, as `Program.begin` says."""
        super().begin(data, scores=scores, following=following, phase=phase)
        self._noise = step_key(self.job.settings.run.seed, _NO_STEP if data.number is None else data.number)
        self._factor = 1.0 if scores else loss_factor(self.module, data.data.layouts)
        if self.part.module.training != (data.number is not None):  # asked first, since a large module has many parts
            self.part.module.train(data.number is not None)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make the items of this lane from rows, and on the last stage compare them with what they are to be."""
        batches = [self._microbatches[microbatch] for microbatch in microbatches]
        prepared = self._prepare(batches)
        rows, spans = self._fed(batches, inputs)
        stage = self.part.stage
        with self.part.drawing(items=self._item_keys(microbatches)):
            found = self.part.target_losses(
                prepared,
                rows,
                spans,
                self._noise_keys(batches),
                sizes=[item.info.size for batch in batches for item in batch.items(self.module, self.place.dp)],
                hidden=None if stage.is_first else next(iter(inputs.values())),
            )
        if not stage.is_last:
            return self._outputs(self._recorded(microbatches, inputs, found))
        return self._loss_of(microbatches, inputs, found)

    def _loss_of(
        self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], losses: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the losses of a pass add to that of the step, and count them."""
        counts, weights = list[int](), list[float]()
        for batch in (self._microbatches[microbatch] for microbatch in microbatches):
            for position in batch.made_samples(self.module, self.place.dp):
                own = target_counts(self.module, batch.layouts[position])
                counts += own
                weights += [float(not batch.layouts[position].is_broken)] * len(own)
        held, padded = held_rows(self.module, self.place, sum(counts))
        self._check(losses, counts, padded)
        losses = self._recorded(microbatches, inputs, losses.unsqueeze(1)).squeeze(1)[: len(held)]
        known = torch.tensor(weights).repeat_interleave(torch.tensor(counts, dtype=torch.int64))[held.start : held.stop]
        if not all(weights):
            losses = losses.masked_fill(to_device(known == 0, self.device), 0)  # whatever a blank item has for one
        total = losses.sum()
        if self.place.tp < self.module.slices:  # of ranks that hold the same losses the first counts
            self._sums.rows += len(held)
            self._sums.add(loss_name(self.module), total)
            self._sums.add(targets_name(self.module), known.sum())
        if not self.module.loss_weight:
            return {}
        loss = self._scaled(self._factor * total)
        if self._probe is not None and not self._scores:
            self._probe.record_loss(self.part.id, microbatches, loss)
        return {LOSS: loss}

    def make(self, rows: Tensor, *, seed: int, prompt: int, index: int) -> Any:
        """Return the item, as datasets give one, that is made from rows [C, H].

        Args:
            rows: all that it is made from: those of its own encoders, in the order of the file, and then those of the
                language model.
            seed: of the noise.
            prompt: number of the prompt that calls for it, by which noise is drawn too.
            index: of the item in its sequence, likewise.
        """
        spec = self.module.spec
        assert isinstance(spec, GeneratorSpec)
        assert spec.generate is not None
        keys = item_keys(step_key(seed, _NO_STEP), [prompt], [index])
        with self.on_compute("forward"):
            rows = rows.to(self._dtype)
            (made,) = spec.generate(self.part.module, self.module.config, rows, [(0, len(rows))], keys)
        return made

    def _fed(
        self, batches: Sequence[Microbatch], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, list[tuple[int, int]]]:
        """Return the rows of a pass, None on later stages, and begin and end of each item's in those of all ranks.

        Where several modules feed it, each item has rows of its own, those of encoders first: rows from which several
        items are made are there once for each.
        """
        is_first, feeders = self.part.stage.is_first, self.job.feeders_of(self.module)
        found = [self._spans(batches, source) for source in feeders]
        edges = {self.job.module(edge.source.module).name: edge.name for edge in self.job.graph.inputs(self.stage)}
        rows = [inputs[edges[source.name]] for source in feeders] if is_first else []
        if len(feeders) == 1:
            ((spans, total),) = found
            return (self._packed.pad(rows[0], total=total) if is_first else None), spans
        firsts = [0, *accumulate(count for _, count in found)]
        runs = [
            [(first + start, first + stop) for first, (start, stop) in zip(firsts[:-1], spans, strict=True)]
            for spans in zip(*(own for own, _ in found), strict=True)
        ]
        bounds = [0, *accumulate(sum(stop - start for start, stop in own) for own in runs)]
        spans = [*pairwise(bounds)]
        if not is_first:
            return None, spans
        taken = torch.cat([torch.arange(0), *(torch.arange(*run) for own in runs for run in own)])
        return self._taken(rows, [total for _, total in found], taken), spans

    def _taken(self, rows: Sequence[Tensor], totals: Sequence[int], taken: Tensor) -> Tensor:
        """Return this rank's slice of some of the rows that are sent to all ranks of the lane.

        Args:
            rows: of each module that feeds it, what of them is sent to this rank.
            totals: how many each module sends.
            taken: [R] which of all of them, those of one module after those of another.
        """
        packed = self._packed
        if packed.slices > 1:
            rows = [
                packed.gather(packed.pad(own, total=total), total=total)
                for own, total in zip(rows, totals, strict=True)
            ]
        mine = packed.held(len(taken))
        # Gradients of rows that several items share are summed in the same order in each run, on CUDA too.
        found = functional.embedding(to_device(taken[mine.start : mine.stop], self.device), torch.cat(list(rows)))
        return packed.pad(found, total=len(taken))

    @property
    def _packed(self) -> PackedRows:
        """How the ranks of a lane share rows."""
        return PackedRows(axis=self._axis, context=ContextAxis.of(self._context))

    def _spans(self, batches: Sequence[Microbatch], source: JobModule) -> tuple[list[tuple[int, int]], int]:
        """Return begin and end of each item's rows in those that a module sends in a pass, and the number of all."""
        found, first = list[tuple[int, int]](), 0
        for batch in batches:
            spans, rows = batch.fed_spans(self.module, source, self.place.dp)
            found += [(first + start, first + stop) for start, stop in spans]
            first += rows
        return found, first

    def _noise_keys(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return by what noise is drawn for the items of a pass, [N] on the CPU."""
        infos = [item.info for batch in batches for item in batch.items(self.module, self.place.dp)]
        return item_keys(self._noise, [info.sample for info in infos], [info.index for info in infos])

    def _check(self, losses: Tensor, counts: Sequence[int], padded: int) -> None:
        """Refuse another number of losses than the plugin said, or as this rank's slice of them has.

        Raises:
            RunError: naming both.
        """
        if tuple(losses.shape) != (padded,):
            of_slice = f" of a rank, of {sum(counts)}," if is_sliced(self.module) else ""
            raise RunError(
                f"modules.{self.module.name}",
                expected=f"{padded} losses{of_slice} for {len(counts)} items of modality {self.module.modality!r}, as "
                f"targets() of generator {self.module.spec.name!r} said",
                got=f"a tensor of shape {tuple(losses.shape)} from its forward()",
                fix="Make them agree.",
            )
