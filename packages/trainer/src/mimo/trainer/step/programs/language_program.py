"""What a stage of the language model does in a plan: tokens and rows in, losses out at the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from mimo.data import NO_LABEL, Packed
from mimo.hooks import PluginError
from mimo.model import LanguageModelSpec
from mimo.model.runtime import AuxLosses, LanguageBatch, MtpLabels, TensorAxis, TopIds, sample_rows
from mimo.schedule.runtime import LOSS
from mimo.topology.device_copies import all_to_device, to_device
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.config.settings import Distil
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.step.programs.loss_terms import divergence_name
from mimo.trainer.step.programs.predictions import gather_ids, predictions_of
from mimo.trainer.step.programs.program import NumberedData, Program, add_sum


@attrs.frozen(kw_only=True)
class _Pass:
    """What a stage is given in a forward.

    Args:
        microbatch: which.
        step: where it comes from.
        packed: samples of this lane.
        batch: these as tensors.
        hidden: rows of the stage before.
        rows: of encoders, by module.
        said: what teachers send, by module.
    """

    microbatch: int
    step: Microbatch
    packed: Packed
    batch: LanguageBatch
    hidden: Tensor | None
    rows: Mapping[str, Tensor]
    said: Mapping[str, Tensor]


class LanguageProgram(Program):
    """A stage of the language model: tokens and rows in, losses out at the last."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Read the packed samples of this lane."""
        (microbatch,) = microbatches
        given = self._given(microbatch, inputs)
        with self.part.drawing(rows=given.batch.draw_keys):
            hidden = self.part.language(given.batch, given.rows, given.hidden)
            return self._finish(given, self._recorded(microbatches, inputs, hidden))

    def _given(self, microbatch: int, inputs: Mapping[str, Tensor]) -> _Pass:
        step = self._microbatches[microbatch]
        packed = step.packed(self.module, self.place.dp, self.place.cp)
        samples = [layout.sample for layout in step.lane_layouts(self.module, self.place.dp)]
        keys = draw_keys_of(packed, samples, self._step_keys[microbatch])
        hidden, rows, said = None, dict[str, Tensor](), dict[str, Tensor]()
        for edge in self.job.graph.inputs(self.stage):
            if self.job.is_inside(edge):
                hidden = inputs[edge.name]
            else:
                (said if self.job.teaches(edge) else rows)[self.job.built(edge.source).module] = inputs[edge.name]
        return _Pass(
            microbatch=microbatch,
            step=step,
            packed=packed,
            batch=language_batch(
                packed, self.job, self.device, module=self.module, trains=not self._scores, draw_keys=keys
            ),
            hidden=hidden,
            rows=rows,
            said=said,
        )

    def _finish(self, given: _Pass, hidden: Tensor) -> Mapping[str, Tensor]:
        """Return what goes out of the stage, which has made these rows, and count what it has done."""
        packed, aux_losses = given.packed, given.batch.aux_losses
        if self.part.stage.is_first and self._counts:
            self._rows += int(np.count_nonzero(packed.samples < len(packed.lengths)))
            if self.place.cp == 0:
                layouts = given.step.lane_layouts(self.module, self.place.dp)
                self._truncated += sum(layout.truncated for layout in layouts)
        outputs = self._fed(given, hidden) if self.part.stage.is_last else self._outputs(hidden)
        losses = list(aux_losses.losses.values())
        if self.part.stage.is_last:
            losses += self._read(given, hidden)
        if losses:
            outputs[LOSS] = self._scaled(torch.stack(losses).sum() if len(losses) > 1 else losses[0])
            if self._probe is not None and not self._scores:
                self._probe.record_loss(self.part.id, (given.microbatch,), outputs[LOSS])
        self._enter(aux_losses)
        return outputs

    def _fed(self, given: _Pass, hidden: Tensor) -> dict[str, Tensor]:
        """Return by edge the rows of the last stage that generators make items from."""
        rows, found = hidden.to(self._dtype), dict[str, Tensor]()
        for edge in self._edges:
            wanted = given.step.fed(self.job.module(edge.target.module), self.place.dp, self.place.cp)
            if self.module.sequence_parallel:  # this rank has a slice of the rows, and sends those of it
                first = self.place.tp * len(rows)
                wanted = wanted[(wanted >= first) & (wanted < first + len(rows))] - first
            found[edge.name] = rows.index_select(0, to_device(torch.from_numpy(wanted), self.device))
        return found

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
            add_sum(self._extra_sums, name, value)

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

    def _read(self, given: _Pass, hidden: Tensor) -> list[Tensor]:
        """Return what this rank's rows are trained by, each a weighted sum over them, and count and judge them."""
        losses, divergences = self._row_losses(given, hidden)
        found, weights = [], given.batch.weights
        for name, each in ((self.module.name, losses), *divergences.items()):
            module, total = self.job.module(name), (each if weights is None else each * weights).sum()
            if self._counts and module is self.module:
                self._losses.append(total.detach().double())
                self._label_weight += given.packed.label_weight
            elif self._counts:
                add_sum(self._extra_sums, divergence_name(module), total)
            if module.loss_weight:
                found.append(total if module.loss_weight == 1 else module.loss_weight * total)
        if self._scores:
            greedy = self.part.language.greedy(hidden)
            if self._counts:
                self._predict(given.step, greedy)
        return found

    def _row_losses(self, given: _Pass, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each row [T] by its label, and its divergence from each teacher."""
        labels = given.batch.labels
        if not given.said:
            return self.part.language.losses(hidden, labels, given.batch.labelled), {}
        taught = given.step.taught(self.place.dp, self.place.cp)
        untaught = np.setdiff1d(np.flatnonzero(given.packed.targets), taught, assume_unique=True)
        with_teachers, alone = all_to_device([torch.from_numpy(rows) for rows in (taught, untaught)], self.device)
        teachers = [
            TopIds.from_bytes(said, self._dtype, temperature=self._distil(name).temperature)
            for name, said in given.said.items()
        ]
        found, *divergences = self.part.distillation.distilled_losses(hidden, labels, with_teachers, alone, teachers)
        return found, dict(zip(given.said, divergences, strict=True))

    def _distil(self, teacher: str) -> Distil:
        found = self.job.module(teacher).distil
        assert found is not None
        return found

    def _predict(self, step: Microbatch, greedy: Tensor) -> None:
        """Put together what the context ranks would write, [T] of each; the first of them judges the samples."""
        shares = [step.packed(self.module, self.place.dp, rank) for rank in range(self.module.grid.cp)]
        ids = gather_ids(greedy, [len(share.tokens) for share in shares], self._context)
        if self.place.cp == 0:
            samples = [layout.sample for layout in step.lane_layouts(self.module, self.place.dp)]
            self.predictions += predictions_of(samples, shares, ids)


class TeacherProgram(LanguageProgram):
    """A stage of a teacher: tokens in, and out of the last what it finds likeliest."""

    def begin(self, data: NumberedData, *, scores: bool, following: NumberedData | None = None) -> None:
        """Take the samples of the step to come, as `Program.begin` says."""
        super().begin(data, scores=scores, following=following)
        if self.part.stage.is_first and self._counts and self.place.cp == 0:  # those made ahead count in their own step
            layouts = (step.lane_layouts(self.module, self.place.dp) for step in self.data.microbatches)
            self._rows = sum(len(layout.tokens) for own in layouts for layout in own)

    def _finish(self, given: _Pass, hidden: Tensor) -> Mapping[str, Tensor]:
        """Return what goes out of the stage: rows, or of those that are learned from the likeliest ids."""
        if not self.part.stage.is_last:
            return self._outputs(hidden)
        rows, distil = given.batch.labelled, self._distil(self.module.name)
        assert rows is not None
        found = self.part.distillation.top_ids(hidden, rows, distil.top_k, temperature=distil.temperature)
        return {edge.name: found.to_bytes(self._dtype) for edge in self._edges}


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
    packed: Packed,
    job: Job,
    device: torch.device,
    *,
    module: JobModule | None = None,
    trains: bool = True,
    draw_keys: Tensor | None = None,
) -> LanguageBatch:
    """Return packed samples as a language model takes them: tensors, with placeholders by encoder.

    Args:
        packed: the samples.
        job: the whole.
        device: where the tensors go.
        module: the language model; None: the one that is not a teacher.
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
            for module in job.encoders_of(module or job.language)
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
