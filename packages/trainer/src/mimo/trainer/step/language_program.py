"""What a stage of the language model does in a plan: tokens and rows in, losses out at the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mimo.data import NO_LABEL, Packed
from mimo.hooks import PluginError
from mimo.model import LanguageModelSpec
from mimo.model.runtime import AuxLosses, LanguageBatch, MtpLabels, TensorAxis, sample_rows
from mimo.schedule.runtime import LOSS
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.job.job import Job
from mimo.trainer.step.predictions import gather_ids, predictions_of
from mimo.trainer.step.program import Program


class LanguageProgram(Program):
    """A stage of the language model: tokens and rows in, losses out at the last."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Read the packed samples of this lane."""
        (microbatch,) = microbatches
        step = self.data.microbatches[microbatch]
        packed = step.packed(self.place.dp, self.place.cp)
        samples = [layout.sample for layout in step.lane_layouts(self.place.dp)]
        keys = draw_keys_of(packed, samples, self._step_keys[microbatch])
        batch = language_batch(packed, self.job, self.device, trains=not self._scores, draw_keys=keys)
        with self.part.drawing(rows=batch.draw_keys):
            return self._pass(microbatches, inputs, packed, batch)

    def _pass(
        self,
        microbatches: tuple[int, ...],
        inputs: Mapping[str, Tensor],
        packed: Packed,
        batch: LanguageBatch,
    ) -> Mapping[str, Tensor]:
        step = self.data.microbatches[microbatches[0]]
        if self.part.stage.is_first:
            sources = {edge.name: self.job.built(edge.source).module for edge in self.job.graph.inputs(self.stage)}
            rows = {sources[edge]: value for edge, value in inputs.items()}
            hidden = self.part.language(batch, rows, None)
            if self._counts:
                self._rows += int(np.count_nonzero(packed.samples < len(packed.lengths)))
            if self._counts and self.place.cp == 0:
                self._truncated += sum(layout.truncated for layout in step.lane_layouts(self.place.dp))
        else:
            (received,) = inputs.values()
            hidden = self.part.language(batch, {}, received)
        hidden = self._recorded(microbatches, inputs, hidden)
        outputs = {} if self.part.stage.is_last else self._outputs(hidden)
        losses = list(batch.aux_losses.losses.values())
        if self.part.stage.is_last:
            losses.append(self._read(step, packed, hidden, batch))
        if losses:
            outputs[LOSS] = self._scaled(torch.stack(losses).sum() if len(losses) > 1 else losses[0])
            if self._probe is not None and not self._scores:
                self._probe.record_loss(self.part.id, microbatches, outputs[LOSS])
        self._enter(batch.aux_losses)
        return outputs

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss of which the gradient is taken; the optimizer divides by the scale."""
        scale = 1.0 if self._optimizer is None else self._optimizer.loss_scale
        return loss if scale == 1.0 else loss * scale

    def _enter(self, aux_losses: AuxLosses) -> None:
        """Add what a forward entered to the step's.

        Raises:
            PluginError: the plugin did not announce it, so that other ranks would not know of it.
        """
        assert isinstance(self.module.spec, LanguageModelSpec)
        announced = self.module.spec.aux_losses(self.module.config)
        sizes = {**dict.fromkeys(announced.losses, 1), **announced.counts}
        for name, value in (*aux_losses.losses.items(), *aux_losses.counts.items()):
            if sizes.get(name) != value.numel():
                raise PluginError(
                    f"modules.{self.module.name}.plugin",
                    expected="what its forward enters into the auxiliary losses named by aux_losses of "
                    f"{self.module.spec.name!r}: {sizes}",
                    got=f"{name!r} of {value.numel()} values",
                    fix="Announce its name and the number of its values.",
                )
            own = value.detach().double().reshape(-1)
            self._extra_sums[name] = self._extra_sums[name] + own if name in self._extra_sums else own

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of all ids in fp32, on each tensor rank, of what the last stage returned."""
        assert isinstance(self.module.spec, LanguageModelSpec)
        axis = TensorAxis(group=self._tensor, rank=self.place.tp, size=self.module.grid.tp)
        here = self.part.language.logits(hidden).float()
        return axis.collect(here.t(), self.module.spec.vocabulary(self.module.config)).t()

    @property
    def _counts(self) -> bool:
        """Whether this rank, and none of its tensor ranks that hold the same rows, counts them."""
        return self.place.tp == 0

    def _read(self, step: Microbatch, packed: Packed, hidden: Tensor, batch: LanguageBatch) -> Tensor:
        """Return the weighted sum of the token losses of this rank's rows, and count and judge them."""
        losses = self.part.language.losses(hidden, batch.labels, batch.labelled)
        loss = (losses if batch.weights is None else losses * batch.weights).sum()
        if self._counts:
            self._losses.append(loss.detach().double())
            self._label_weight += packed.label_weight
        if self._scores:
            greedy = self.part.language.greedy(hidden)
            if self._counts:
                self._predict(step, greedy)
        return loss

    def _predict(self, step: Microbatch, greedy: Tensor) -> None:
        """Put together what the context ranks would write, [T] of each; the first of them judges the samples."""
        shares = [step.packed(self.place.dp, rank) for rank in range(self.module.grid.cp)]
        ids = gather_ids(greedy, [len(share.tokens) for share in shares], self._context)
        if self.place.cp == 0:
            samples = [layout.sample for layout in step.lane_layouts(self.place.dp)]
            self.predictions += predictions_of(samples, shares, ids)


def draw_keys_of(packed: Packed, samples: Sequence[int], step: Tensor | None) -> Tensor | None:
    """Return by what layers draw at random, [T, 2] of packed rows; those of the padding are anything.

    Args:
        packed: the samples.
        samples: their numbers in the dataset.
        step: key of the step; None where nothing is drawn.
    """
    if step is None:
        return None
    numbers = torch.tensor([*samples, 0])[torch.from_numpy(packed.samples)]
    return sample_rows(step, numbers, torch.from_numpy(packed.positions))


def language_batch(
    packed: Packed, job: Job, device: torch.device, *, trains: bool = True, draw_keys: Tensor | None = None
) -> LanguageBatch:
    """Return packed samples as the language model takes them: tensors, with placeholders by encoder.

    Args:
        packed: the samples.
        job: the whole.
        device: where the tensors go.
        trains: whether what it is to predict further on is asked too.
        draw_keys: of `draw_keys_of`.
    """
    weights = packed.weights
    batch = LanguageBatch(
        tokens=torch.from_numpy(packed.tokens),
        labels=torch.from_numpy(packed.labels),
        positions=torch.from_numpy(packed.positions),
        lengths=packed.lengths,
        placeholders={
            module.name: torch.from_numpy(packed.placeholders[module.modality])
            for module in job.encoders
            if module.modality in packed.placeholders
        },
        samples=torch.from_numpy(packed.samples),
        label_tokens=packed.label_tokens,
        labelled=torch.from_numpy(np.flatnonzero(packed.targets)),
        weights=None if weights is None else torch.from_numpy(weights.rows),
        weight_sums=None if weights is None else weights.sums,
        grid_positions=None if packed.grid_positions is None else torch.from_numpy(packed.grid_positions),
        mtp_labels=tuple(_mtp_labels(packed, k) for k in range(len(packed.next_labels)) if trains),
        used=int((packed.samples < len(packed.lengths)).sum()),
        items=packed.items,
        draw_keys=draw_keys,
    )
    return batch.to(device)


def _mtp_labels(packed: Packed, k: int) -> MtpLabels:
    """Return what packed samples are to predict k + 1 tokens after the next."""
    labels, counts = packed.next_labels[k], packed.next_counts[k]
    own = weights = None
    rows = np.flatnonzero(labels != NO_LABEL)
    if packed.weights is not None:
        own, weights = torch.from_numpy(packed.weights.next_rows[k]), packed.weights.next_sums[k]
        rows = np.flatnonzero(own)  # the others have labels too, which later depths read as their tokens
    return MtpLabels(torch.from_numpy(labels), torch.from_numpy(rows), counts, own, weights)
