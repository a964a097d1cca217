"""What a stage of the language model does in a plan: tokens and rows in, losses out at the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo.data import Packed
from mimo.hooks import PluginError
from mimo.model import LanguageModelSpec
from mimo.model.runtime import AuxLosses, LanguageBatch, hidden_losses
from mimo.schedule.runtime import LOSS
from mimo.topology.device_copies import all_to_device, to_device
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.config.settings import Distil
from mimo.trainer.step.programs.language_batches import draw_keys_of, language_batch
from mimo.trainer.step.programs.loss_terms import divergence_name, hidden_name
from mimo.trainer.step.programs.predictions import gather_ids, predictions_of
from mimo.trainer.step.programs.program import Program, StepSums
from mimo.trainer.step.programs.teacher_rows import TeacherRows


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
        said: what teachers say of the rows that are taught, by module.
        sums: of the step that the samples are of.
    """

    microbatch: int
    step: Microbatch
    packed: Packed
    batch: LanguageBatch
    hidden: Tensor | None
    rows: Mapping[str, Tensor]
    said: Mapping[str, TeacherRows]
    sums: StepSums


@attrs.frozen(kw_only=True)
class _Term:
    """A part of the loss.

    Args:
        name: of its sum, in what ranks agree on beside the loss; None for the loss by labels.
        total: the weighted sum over this rank's rows.
        weight: by which it is learned; 0: it is only reported.
        counts: whether this rank, and none of its tensor ranks that hold the same rows, counts it.
    """

    name: str | None
    total: Tensor
    weight: float
    counts: bool


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
        hidden, rows, said = None, dict[str, Tensor](), dict[str, TeacherRows]()
        for edge in self.job.graph.inputs(self.stage):
            source, given = self.job.built(edge.source).module, inputs[edge.name]
            if self.job.is_inside(edge):
                hidden = given
            elif self.job.teaches(edge):
                said[source] = TeacherRows.from_bytes(given, self.job.settings.run.precision, self._distil(source))
            else:
                rows[source] = given
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
            sums=self._sums_of([microbatch]),
        )

    def _finish(self, given: _Pass, hidden: Tensor) -> Mapping[str, Tensor]:
        """Return what goes out of the stage, which has made these rows, and count what it has done."""
        packed, aux_losses = given.packed, given.batch.aux_losses
        if self.part.stage.is_first and self._counts:
            given.sums.rows += int(np.count_nonzero(packed.samples < len(packed.lengths)))
            if self.place.cp == 0:
                layouts = given.step.lane_layouts(self.module, self.place.dp)
                given.sums.truncated += sum(layout.truncated for layout in layouts)
        outputs = self._fed(given, hidden) if self.part.stage.is_last else self._outputs(hidden)
        losses = list(aux_losses.losses.values())
        if self.part.stage.is_last:
            losses += self._read(given, hidden)
        if losses:
            outputs[LOSS] = self._scaled(torch.stack(losses).sum() if len(losses) > 1 else losses[0])
            if self._probe is not None and not self._scores:
                self._probe.record_loss(self.part.id, (given.microbatch,), outputs[LOSS])
        self._enter(given.sums, aux_losses)
        return outputs

    def _fed(self, given: _Pass, hidden: Tensor) -> dict[str, Tensor]:
        """Return by edge the rows of the last stage that generators make items from."""
        rows, found = hidden.to(self._dtype), dict[str, Tensor]()
        for edge in self._edges:
            wanted = given.step.fed(self.job.module(edge.target.module), self.place.dp, self.place.cp)
            own = self._own(wanted, rows)[1]
            found[edge.name] = rows.index_select(0, to_device(torch.from_numpy(own), self.device))
        return found

    def _own(self, wanted: NDArray[np.int64], rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of some of the rows of all tensor ranks this one holds, and where among its own they lie.

        Args:
            wanted: [R] their numbers.
            rows: what this rank holds: all, or with sequence parallelism a slice.
        """
        first = self.place.tp * len(rows) if self.module.sequence_parallel else 0
        chosen = np.flatnonzero((wanted >= first) & (wanted < first + len(rows)))
        return chosen, wanted[chosen] - first

    def _enter(self, sums: StepSums, aux_losses: AuxLosses) -> None:
        """Add what a forward entered to the sums of its step.

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
            sums.add(name, value)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of all ids in fp32, on each tensor rank, of what the last stage returned."""
        assert isinstance(self.module.spec, LanguageModelSpec)
        here = self.part.language.logits(hidden).float()
        return self._axis.collect(here.t(), self.module.spec.vocabulary(self.module.config)).t()

    @property
    def _counts(self) -> bool:
        """Whether this rank, and none of its tensor ranks that hold the same rows, counts them."""
        return self.place.tp == 0

    def _read(self, given: _Pass, hidden: Tensor) -> list[Tensor]:
        """Return what this rank's rows are trained by, each a weighted sum over them, and count and judge them."""
        found = []
        for term in self._terms(given, hidden):
            if term.counts and term.name is None:
                given.sums.losses.append(term.total.detach().double())
                given.sums.label_weight += given.packed.label_weight
            elif term.counts and term.name:
                given.sums.add(term.name, term.total)
            if term.weight:
                found.append(term.total if term.weight == 1 else term.weight * term.total)
        if self._scores:
            greedy = self.part.language.greedy(hidden)
            if self._counts:
                self._predict(given.step, greedy)
        return found

    def _terms(self, given: _Pass, hidden: Tensor) -> Iterator[_Term]:
        """Yield the parts of the loss: by labels, by the ids of teachers, and by their hidden rows."""
        taught = given.step.taught(self.place.dp, self.place.cp) if given.said else np.zeros(0, dtype=np.int64)
        yield from self._by_logits(given, hidden, taught)
        yield from self._by_hidden(given, hidden, taught)

    def _by_logits(self, given: _Pass, hidden: Tensor, taught: NDArray[np.int64]) -> Iterator[_Term]:
        """Yield the loss by labels, and the divergence from each teacher of ids, of one computation of the logits."""
        labels, weights = given.batch.labels, given.batch.weights
        said = {name: one.ids for name, one in given.said.items() if one.ids is not None}
        if said:
            untaught = np.setdiff1d(np.flatnonzero(given.packed.targets), taught, assume_unique=True)
            rows, others = all_to_device([torch.from_numpy(some) for some in (taught, untaught)], self.device)
            found = self.part.distillation.distilled_losses(hidden, labels, rows, others, list(said.values()))
        else:
            found = (self.part.language.losses(hidden, labels, given.batch.labelled),)
        for name, each in zip((self.module.name, *said), found, strict=True):
            module = self.job.module(name)
            yield _Term(
                name=None if module is self.module else divergence_name(module),
                total=(each if weights is None else each * weights).sum(),
                weight=module.loss_weight,
                counts=self._counts,
            )

    def _by_hidden(self, given: _Pass, hidden: Tensor, taught: NDArray[np.int64]) -> Iterator[_Term]:
        """Yield how far the rows that this rank holds are from each teacher's."""
        said = {name: one for name, one in given.said.items() if one.hidden is not None}
        if not said:
            return
        chosen, own = self._own(taught, hidden)
        on_device = all_to_device([torch.from_numpy(some) for some in (chosen, own, taught[chosen])], self.device)
        weights = None if given.batch.weights is None else given.batch.weights[on_device[2]]
        rows = hidden.index_select(0, on_device[1])
        for name, one in said.items():
            distil, wanted = self._distil(name), one.hidden
            assert distil.hidden != "none"
            assert wanted is not None
            if one.ids is not None:  # with which every tensor rank has all rows
                wanted = wanted.index_select(0, on_device[0])
            each = hidden_losses(rows, wanted, distil.hidden)
            yield _Term(
                name=hidden_name(self.job.module(name)),
                total=(each if weights is None else each * weights).sum(),
                weight=distil.hidden_weight,
                counts=self._counts or self._axis.splits_rows,
            )

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
            self._sums.predictions += predictions_of(samples, shares, ids)


class TeacherProgram(LanguageProgram):
    """A stage of a teacher: tokens in, and out of the last what it finds likeliest, or its hidden rows."""

    def _finish(self, given: _Pass, hidden: Tensor) -> Mapping[str, Tensor]:
        """Return what goes out of the stage: rows, or what it says of those that are learned from."""
        if self.part.stage.is_first and self._counts and self.place.cp == 0:
            given.sums.rows += sum(len(own.tokens) for own in given.step.lane_layouts(self.module, self.place.dp))
        if not self.part.stage.is_last:
            return self._outputs(hidden)
        distil, targets = self._distil(self.module.name), given.batch.labelled
        assert targets is not None
        ids = rows = None
        if distil.top_k:
            ids = self.part.distillation.top_ids(hidden, targets, distil.top_k, temperature=distil.temperature)
        if distil.compares_hidden and distil.top_k:  # each tensor rank sends ids of all rows, so hidden ones too
            rows = (self._axis.enter(hidden) if self._axis.splits_rows else hidden).index_select(0, targets)
        elif distil.compares_hidden:
            own = self._own(np.flatnonzero(given.packed.targets), hidden)[1]
            rows = hidden.index_select(0, to_device(torch.from_numpy(own), self.device))
        found = TeacherRows(ids=ids, hidden=rows).to_bytes(self.job.settings.run.precision)
        return {edge.name: found for edge in self._edges}
