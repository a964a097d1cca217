"""What each pipeline stage does in a plan: the model and the optimizer behind the executor's protocol."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo.data import NO_LABEL, Packed, PlacedItem
from mimo.hooks import RunError
from mimo.model.runtime import LanguageBatch, Part
from mimo.optimizer.runtime import MimoOptimizer, Tally
from mimo.schedule.runtime import LOSS
from mimo.topology import Coordinates, Edge
from mimo.trainer._resolved import Job, JobModule
from mimo.trainer._step_data import Microbatch, StepData

COUNTS = ("truncated", "right", "samples")
"""Sums beside loss and rows: samples cut short; of the judged samples that have labels, those whose every label token
is the argmax, and all."""

_SIZES_SHOWN = 4


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
        place: where this rank stands in the module's grid.
        outputs: edges that this stage feeds.
        optimizer: reduces its gradients; None where nothing trains.
    """

    def __init__(
        self,
        job: Job,
        module: JobModule,
        part: Part,
        *,
        place: Coordinates,
        outputs: Sequence[Edge],
        optimizer: MimoOptimizer | None,
        device: torch.device,
    ) -> None:
        self.job = job
        self.module = module
        self.part = part
        self.place = place
        self.device = device
        self._ports = tuple(edge.name for edge in outputs)
        self._optimizer = optimizer
        self._data: StepData | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank, and none of those that hold the same rows, counts them."""
        return self.place.tp == 0 and self.place.cp == 0

    @property
    def data(self) -> StepData:
        """The samples of the step that runs."""
        assert self._data is not None
        return self._data

    def begin(self, data: StepData, *, judge: bool) -> None:
        """Take the samples of the step to come; ``judge`` also compares each label with the argmax."""
        self._data = data
        self._judge = judge
        self._losses: list[Tensor] = []
        self.written: list[Written] = []
        self._label_tokens = 0
        self._rows = 0
        self._truncated = 0

    def tally(self) -> Tally:
        """Return this rank's share of what the step adds up to."""
        return Tally(
            loss=float(torch.stack(self._losses).sum()) if self._losses else 0.0,
            label_tokens=self._label_tokens,
            rows={self.module.name: self._rows},
            counts={
                "truncated": self._truncated,
                "right": sum(written.right for written in self.written),
                "samples": len(self.written),
            },
        )

    @abc.abstractmethod
    def forward(self, microbatch: int, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a microbatch, as `StageProgram` says."""

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks that share the parameters."""
        assert self._optimizer is not None
        self._optimizer.reduce(self.module.name)

    def reduce_tied(self) -> None:
        """Add up the gradients of the parameters that the first and last stage share."""
        assert self._optimizer is not None
        self._optimizer.reduce_tied(self.module.name)

    def _outputs(self, rows: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(self._ports, rows)


class EncoderProgram(Program):
    """A stage of an encoder: items in, rows out."""

    def forward(self, microbatch: int, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Encode the items of this lane."""
        batch = self.data.microbatches[microbatch]
        items = batch.items(self.module, self.place.dp)
        prepared = []
        if self.part.stage.is_first:
            prepared = [
                {name: tensor.to(self.device) for name, tensor in item.items()}
                for item in batch.prepare(self.module, self.place.dp)
            ]
        hidden = next(iter(inputs.values()), None)
        rows = self.part.encode(prepared, [item.info.size for item in items], hidden)
        if self.part.stage.is_last:
            rows = take_rows(self.job, self.module, items, rows)
            if self.counts:
                self._rows += sum(item.rows for item in items)
        return self._outputs(rows)


class LanguageProgram(Program):
    """A stage of the language model: tokens and rows in, losses out at the last."""

    def forward(self, microbatch: int, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Read the packed samples of this lane."""
        step = self.data.microbatches[microbatch]
        packed = step.packed(self.place.dp)
        batch = language_batch(packed, self.job, self.device)
        if self.part.stage.is_first:
            rows = {edge.removesuffix(f"->{self.module.name}"): value for edge, value in inputs.items()}
            hidden = self.part.language(batch, rows, None)
            if self.counts:
                self._rows += sum(packed.lengths)
                span = step.owners(self.module).span(self.place.dp)
                self._truncated += sum(step.layouts[position].truncated for position in span)
        else:
            (received,) = inputs.values()
            hidden = self.part.language(batch, {}, received)
        if not self.part.stage.is_last:
            return self._outputs(hidden)
        loss = self.part.language.losses(hidden, batch.labels).sum()
        if self.counts:
            self._losses.append(loss.detach().double())
            self._label_tokens += int(np.count_nonzero(packed.labels != NO_LABEL))
        if self._judge:
            greedy = self.part.language.greedy(hidden)
            if self.counts:
                self.written += _written(step, packed, self.module, self.place.dp, greedy)
        return {LOSS: loss}


def take_rows(job: Job, module: JobModule, items: Sequence[PlacedItem], rows: Tensor) -> Tensor:
    """Return an encoder's rows in the precision in which they travel; refuse them where they are not what it said.

    Raises:
        RunError: naming the module and the sizes of its items.
    """
    expected = (sum(item.rows for item in items), job.hidden)
    if tuple(rows.shape) != expected:
        sizes = ", ".join(f"{item.info.size} -> {item.rows}" for item in items[:_SIZES_SHOWN]) + (
            ", …" if len(items) > _SIZES_SHOWN else ""
        )
        raise RunError(
            f"modules.{module.name}",
            expected=f"{expected[0]} rows of width {expected[1]}, as rows() of encoder {module.spec.name!r} said "
            f"for {len(items)} items ({sizes})",
            got=f"a tensor of shape {tuple(rows.shape)} from its forward()",
            fix="Make them agree.",
        )
    return rows.to(torch.float32)


def language_batch(packed: Packed, job: Job, device: torch.device) -> LanguageBatch:
    """Return packed samples as the language model takes them: tensors, with placeholders by encoder."""

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
    )


def _written(step: Microbatch, packed: Packed, module: JobModule, lane: int, greedy: Tensor) -> list[Written]:
    """Return what was written for each sample of a lane."""
    ids, found, start = greedy.tolist(), [], 0
    for position, length in zip(step.owners(module).span(lane), packed.lengths, strict=True):
        labels = packed.labels[start : start + length].tolist()
        pairs = [(ids[start + at], label) for at, label in enumerate(labels) if label != NO_LABEL]
        if pairs:
            found.append(
                Written(
                    sample=step.layouts[position].sample,
                    ids=tuple(written for written, _ in pairs),
                    right=all(written == label for written, label in pairs),
                )
            )
        start += length
    return found
