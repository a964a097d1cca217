"""What each pipeline stage does in a plan: the model and the optimizer behind the executor's protocol."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import attrs
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mimo.data import NO_LABEL, Packed, PlacedItem
from mimo.hooks import PluginError, RunError, UserError
from mimo.model import LanguageModelSpec
from mimo.model.runtime import AuxLosses, DeferredWeightGrads, LanguageBatch, MtpLabels, Part, TensorAxis
from mimo.optimizer import Phase
from mimo.optimizer.runtime import LocalStats, MimoOptimizer
from mimo.schedule.runtime import LOSS
from mimo.topology import Coordinates, Edge, StageId
from mimo.topology.collectives import all_gather_single
from mimo.trainer.batch.row_layout import held_rows
from mimo.trainer.batch.step_data import Microbatch, StepData
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.step.probe import Witness

COUNTS = ("truncated", "right", "samples")
"""Sums beside loss and rows: samples cut short; of the judged samples that have labels, those whose every label token
is the argmax, and all."""

_ITEMS_SHOWN = 4
Item: TypeAlias = Mapping[str, Tensor]
"""What an encoder plugin prepares of an item: tensors by name."""


@attrs.frozen(kw_only=True)
class Written:
    """What the model writes for a held-out sample: at each label, the argmax given the true tokens before it."""

    sample: int
    ids: tuple[int, ...]
    right: bool


class Program(abc.ABC):
    """One stage of one module on this rank; the same object serves training and evaluation.

    Args:
        job: the whole.
        module: the one of it that this is a stage of.
        part: its parameters and computation on this rank.
        stage: the stage, as plans name it.
        rank: this one.
        place: where this rank stands in the module's grid.
        outputs: edges that this stage feeds.
        optimizer: reduces its gradients; None where nothing trains.
        context: group of the ranks that hold the rest of this rank's samples.
        tensor: group of the ranks that share this rank's rows.
        witness: sees what it computes while it trains; None for nobody.
    """

    def __init__(
        self,
        job: Job,
        module: JobModule,
        part: Part,
        stage: StageId,
        *,
        rank: int,
        place: Coordinates,
        outputs: Sequence[Edge],
        optimizer: MimoOptimizer | None,
        context: dist.ProcessGroup,
        tensor: dist.ProcessGroup,
        device: torch.device,
        witness: Witness | None = None,
    ) -> None:
        self.job = job
        self.module = module
        self.part = part
        self.stage = stage
        self.place = place
        self.device = device
        self._dtype = compute_dtype(job.settings.run.precision)
        self._rank = rank
        self._edges = tuple(outputs)
        self._optimizer = optimizer
        self._context = context
        self._tensor = tensor
        self._witness = witness
        self._data: StepData | None = None

    @property
    def data(self) -> StepData:
        """The samples of the step that runs."""
        assert self._data is not None
        return self._data

    def begin(self, data: StepData, *, judge: bool, following: StepData | None = None) -> None:
        """Take the samples of the step to come.

        Args:
            data: of the step.
            judge: also compare each label with the argmax.
            following: samples of the step after it, for what is made ahead.
        """
        self._data = data
        self._microbatches = (*data.microbatches, *(() if following is None else following.microbatches))
        self._judge = judge
        self._losses: list[Tensor] = []
        self.written: list[Written] = []
        self._told: dict[str, Tensor] = {}
        self._label_tokens = 0
        self._rows = 0
        self._truncated = 0

    def tally(self) -> LocalStats:
        """Return this rank's share of what the step adds up to."""
        return LocalStats(
            loss=float(torch.stack(self._losses).sum()) if self._losses else 0.0,
            label_tokens=self._label_tokens,
            rows={self.module.name: self._rows},
            counts={
                "truncated": self._truncated,
                "right": sum(written.right for written in self.written),
                "samples": len(self.written),
            },
            extra_sums=self._told,
        )

    @abc.abstractmethod
    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a pass, as `StageProgram` says."""

    def _seen(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Have the rows of a pass be seen, and return what goes on as these."""
        if self._witness is None or self._judge:
            return rows
        return self._witness.see_pass(self.part.id, microbatches, inputs, rows)

    def defer_weight_grads(self) -> AbstractContextManager[DeferredWeightGrads]:
        """Put off weight gradients, as `StageProgram` says."""
        return self.part.defer_weight_grads()

    def on_compute(self, phase: Phase) -> AbstractContextManager[None]:
        """Tell the optimizer of a forward or backward, as `StageProgram` says."""
        assert self._optimizer is not None
        return self._optimizer.on_compute(self.module.name, self.part.stage.index, phase)

    def on_grad_accumulation(self, deferred: Callable[[], None] | None, *, last: bool) -> AbstractContextManager[None]:
        """Tell the optimizer of what adds to the gradients, as `StageProgram` says."""
        assert self._optimizer is not None
        assert deferred is None or isinstance(deferred, DeferredWeightGrads)
        return self._optimizer.on_grad_accumulation(self.module.name, self.part.stage.index, deferred, last=last)

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks that share the parameters."""
        assert self._optimizer is not None
        self._optimizer.reduce(self.module.name, self.part.stage.index)

    def reduce_tied(self) -> None:
        """Add up the gradients of the parameters that the first and last stage share."""
        assert self._optimizer is not None
        self._optimizer.reduce_tied(self.module.name)

    def _outputs(self, rows: Tensor) -> dict[str, Tensor]:
        """Return rows by edge, in the precision in which they travel."""
        rows = rows.to(self._dtype)
        return {edge.name: rows for edge in self._edges}


class EncoderProgram(Program):
    """A stage of an encoder: items in, rows out.

    Attributes:
        fault: why items of the following step can't be encoded. It is for that step to raise, and until then zeros
            stand for their rows.
    """

    fault: UserError | None = None

    def begin(self, data: StepData, *, judge: bool, following: StepData | None = None) -> None:
        """Take the samples of the step to come, as `Program.begin` says."""
        super().begin(data, judge=judge, following=following)
        self.fault = None
        if self.job.graph.by_name[self.stage.module].prefetch and not judge:
            self._rows = sum(self._count(batch.items(self.module, self.place.dp)) for batch in data.microbatches)

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Encode the items of this lane."""
        batches = [self._microbatches[microbatch] for microbatch in microbatches]
        is_ahead = microbatches[0] >= len(self.data.microbatches)
        if not is_ahead:
            rows, items = self._encode(batches, self._prepare(batches), inputs)
            self._rows += self._count(items)
            return self._outputs(self._seen(microbatches, inputs, rows))
        prepared = None
        try:
            prepared = self._prepare(batches)
        except UserError as fault:
            self.fault = self.fault or fault
        if self._all_have(prepared):
            try:
                rows, _ = self._encode(batches, prepared or [], inputs)
                return self._outputs(self._seen(microbatches, inputs, rows))
            except UserError as fault:
                self.fault = self.fault or fault
        return {edge.name: self._nothing(edge, batches) for edge in self._edges}

    def _all_have(self, prepared: Sequence[Item] | None) -> bool:
        """Tell whether every rank that computes with this one has its items, so that none waits for it inside."""
        if not self.part.stage.is_first:
            return True
        lacks = torch.tensor([prepared is None], dtype=torch.int32, device=self.device)
        for group in (self._tensor, self._context):
            if group.size() > 1:
                dist.all_reduce(lacks, op=dist.ReduceOp.MAX, group=group)
        return not lacks.item()

    def _nothing(self, edge: Edge, batches: Sequence[Microbatch]) -> Tensor:
        """Return zeros in the place of what this rank would send."""
        rows = sum(batch.route(edge, self._rank).held for batch in batches)
        return torch.zeros((rows, self.job.width(edge)), dtype=self._dtype, device=self.device)

    def _count(self, items: Sequence[PlacedItem]) -> int:
        """Return how many rows of items this rank, and none that holds the same or a part of them, counts."""
        counts = self.part.stage.is_last and self.place.tp == 0 and self.place.cp == 0
        return sum(item.rows for item in items) if counts else 0

    def _prepare(self, batches: Sequence[Microbatch]) -> list[Item]:
        """Decode the items of a pass, where they enter the encoder."""
        if not self.part.stage.is_first:
            return []
        items = (item for batch in batches for item in batch.prepare(self.module, self.place.dp))
        return [on_device(item, self.job, self.device) for item in items]

    def _encode(
        self, batches: Sequence[Microbatch], prepared: Sequence[Item], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[PlacedItem]]:
        """Return this rank's rows of a pass, and the items that they are of."""
        items = [item for batch in batches for item in batch.items(self.module, self.place.dp)]
        hidden = next(iter(inputs.values()), None)
        rows = self.part.encode(prepared, [item.info.size for item in items], hidden)
        if self.part.stage.is_last:
            rows = take_rows(self.job, self.module, items, rows, self.place)
        return rows, items


class LanguageProgram(Program):
    """A stage of the language model: tokens and rows in, losses out at the last."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Read the packed samples of this lane."""
        (microbatch,) = microbatches
        step = self.data.microbatches[microbatch]
        packed = step.packed(self.place.dp, self.place.cp)
        batch = language_batch(packed, self.job, self.device, trains=not self._judge)
        if self.part.stage.is_first:
            sources = {edge.name: self.job.built(edge.source).module for edge in self.job.graph.inputs(self.stage)}
            rows = {sources[edge]: value for edge, value in inputs.items()}
            hidden = self.part.language(batch, rows, None)
            if self._counts:
                self._rows += int(np.count_nonzero(packed.samples < len(packed.lengths)))
            if self._counts and self.place.cp == 0:
                span = step.owners(self.module).span(self.place.dp)
                self._truncated += sum(step.layouts[position].truncated for position in span)
        else:
            (received,) = inputs.values()
            hidden = self.part.language(batch, {}, received)
        hidden = self._seen(microbatches, inputs, hidden)
        outputs = {} if self.part.stage.is_last else self._outputs(hidden)
        losses = list(batch.aux_losses.losses.values())
        if self.part.stage.is_last:
            losses.append(self._read(step, packed, hidden, batch))
        if losses:
            outputs[LOSS] = self._scaled(torch.stack(losses).sum() if len(losses) > 1 else losses[0])
            if self._witness is not None and not self._judge:
                self._witness.see_loss(self.part.id, microbatches, outputs[LOSS])
        self._enter(batch.aux_losses)
        return outputs

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss of which the gradient is taken; the optimizer divides by the scale."""
        scale = 1.0 if self._optimizer is None else self._optimizer.loss_scale
        return loss if scale == 1.0 else loss * scale

    def _enter(self, aux_losses: AuxLosses) -> None:
        """Add what a forward told to the step's.

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
            told = value.detach().double().reshape(-1)
            self._told[name] = self._told[name] + told if name in self._told else told

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
        """Return the sum of the token losses of this rank's rows, and count and judge them."""
        loss = self.part.language.losses(hidden, batch.labels, batch.labelled).sum()
        if self._counts:
            self._losses.append(loss.detach().double())
            self._label_tokens += int(np.count_nonzero(packed.labels != NO_LABEL))
        if self._judge:
            greedy = self.part.language.greedy(hidden)
            if self._counts:
                self._judge_samples(step, greedy)
        return loss

    def _judge_samples(self, step: Microbatch, greedy: Tensor) -> None:
        """Put together what the context ranks would write, [T] of each; the first of them judges the samples."""
        shares = [step.packed(self.place.dp, rank) for rank in range(self.module.grid.cp)]
        ids = _gather(greedy, [len(share.tokens) for share in shares], self._context)
        if self.place.cp == 0:
            owned = step.owners(self.module).span(self.place.dp)
            samples = [step.layouts[position].sample for position in owned]
            self.written += _written(samples, shares, ids)


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
    if tuple(rows.shape) != (padded, job.hidden):
        told = ", ".join(
            f"{item.rows} for item {item.info.index} of sample {item.info.sample} of size {item.info.size}"
            for item in items[:_ITEMS_SHOWN]
        ) + (", ..." if len(items) > _ITEMS_SHOWN else "")
        raise RunError(
            f"modules.{module.name}",
            expected=f"{padded} rows of width {job.hidden} for {len(items)} items of modality {module.modality!r}, "
            f"one for each of their placeholders, as rows() of encoder {module.spec.name!r} said ({told})",
            got=f"a tensor of shape {tuple(rows.shape)} from its forward()",
            fix="Make them agree.",
        )
    return rows[: len(held)]


def on_device(item: Item, job: Job, device: torch.device) -> Item:
    """Return a prepared item where a rank computes; in reduced precision its floating numbers in that."""
    precision = job.settings.run.precision
    dtype = None if precision == "fp32" else compute_dtype(precision)
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in item.items()}


def language_batch(packed: Packed, job: Job, device: torch.device, *, trains: bool = True) -> LanguageBatch:
    """Return packed samples as the language model takes them: tensors, with placeholders by encoder.

    Args:
        packed: the samples.
        job: the whole.
        device: where the tensors go.
        trains: whether what it is to predict further on is asked too.
    """

    def tensor(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return LanguageBatch(
        tokens=tensor(packed.tokens),
        labels=tensor(packed.labels),
        positions=tensor(packed.positions),
        lengths=packed.lengths,
        placeholders={
            module.name: tensor(packed.placeholders[module.modality])
            for module in job.encoders
            if module.modality in packed.placeholders
        },
        samples=tensor(packed.samples),
        label_tokens=packed.label_tokens,
        labelled=tensor(np.flatnonzero(packed.labels != NO_LABEL)),
        grid_positions=None if packed.grid_positions is None else tensor(packed.grid_positions),
        mtp_labels=tuple(
            MtpLabels(tensor(labels), tensor(np.flatnonzero(labels != NO_LABEL)), counts)
            for labels, counts in zip(packed.next_labels, packed.next_counts, strict=True)
            if trains
        ),
    )


def _gather(ids: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> list[NDArray[np.int64]]:
    """Return the ids [t] of every rank of ``group``, of which there are as many as ``counts`` says."""
    if len(counts) == 1:
        return [ids.cpu().numpy()]
    padded = ids.new_zeros(max(counts))
    padded[: len(ids)] = ids
    found = padded.new_empty(len(counts) * len(padded))
    if len(padded):
        all_gather_single(found, padded, group)
    rows = found.cpu().numpy().reshape(len(counts), -1)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _written(samples: Sequence[int], shares: Sequence[Packed], ids: Sequence[NDArray[np.int64]]) -> Iterator[Written]:
    """Yield what was written for each sample of a lane that has labels.

    Args:
        samples: of the lane.
        shares: each context rank's rows of them.
        ids: [T] of each, what the model writes after each row.
    """
    number, position, label, written = (
        np.concatenate(found)
        for found in zip(
            *((share.samples, share.positions, share.labels, own) for share, own in zip(shares, ids, strict=True)),
            strict=True,
        )
    )
    order = np.lexsort((position, number))
    order = order[label[order] != NO_LABEL]
    for index, sample in enumerate(samples):
        own = order[number[order] == index]
        if len(own):
            yield Written(
                sample=sample, ids=tuple(written[own].tolist()), right=bool((written[own] == label[own]).all())
            )
