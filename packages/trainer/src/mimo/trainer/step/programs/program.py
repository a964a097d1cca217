"""What a pipeline stage does in a plan, of any module: the model and the optimizer behind the executor's protocol."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.runtime import DeferredWeightGrads, Part, TensorAxis, step_key
from mimo.optimizer import Phase
from mimo.optimizer.runtime import LocalStats, MimoOptimizer
from mimo.schedule import PlanPhase
from mimo.topology import Coordinates, Edge, StageId
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.step.probe import StepProbe
from mimo.trainer.step.programs.predictions import Prediction

COUNTS = ("truncated", "right", "samples")
"""Sums beside loss and rows: samples cut short; of the held-out samples that have labels that weigh something, those of
which each such label is the argmax, and all."""


@attrs.frozen
class NumberedData:
    """Samples, and of which step.

    Args:
        data: the samples.
        number: of the step, by which layers draw at random; None where they are to draw nothing, as in evaluation.
    """

    data: StepData
    number: int | None


@attrs.define(eq=False)
class StepSums:
    """What a program adds up over the passes of a step.

    Args:
        losses: by labels, of each pass.
        label_weight: of these labels.
        rows: that this rank, and none that holds the same, has computed.
        truncated: samples that were cut.
        predictions: of samples that are scored.
        extra: further sums, by name.
    """

    losses: list[Tensor] = attrs.field(factory=list)
    label_weight: float = 0.0
    rows: int = 0
    truncated: int = 0
    predictions: list[Prediction] = attrs.field(factory=list)
    extra: dict[str, Tensor] = attrs.field(factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add values to one of the further sums."""
        own = value.detach().double().reshape(-1)
        self.extra[name] = self.extra[name] + own if name in self.extra else own


class Program(abc.ABC):
    """One stage of one module on this rank; the same object serves training and evaluation.

    Args:
        job: the whole.
        module: the one of it that this is a stage of.
        part: its parameters and computation on this rank.
        stage: the stage, as plans name it.
        place: where this rank stands in the module's grid.
        outputs: edges that this stage feeds.
        optimizer: reduces its gradients; None where nothing trains.
        context: group of the ranks that hold the rest of this rank's samples.
        tensor: group of the ranks that share this rank's rows.
        probe: records what it computes while it trains; None for none.
    """

    def __init__(
        self,
        job: Job,
        module: JobModule,
        part: Part,
        stage: StageId,
        *,
        place: Coordinates,
        outputs: Sequence[Edge],
        optimizer: MimoOptimizer | None,
        context: dist.ProcessGroup,
        tensor: dist.ProcessGroup,
        device: torch.device,
        probe: StepProbe | None = None,
    ) -> None:
        self.job = job
        self.module = module
        self.part = part
        self.stage = stage
        self.place = place
        self.device = device
        self._dtype = compute_dtype(job.settings.run.precision)
        self._edges = tuple(outputs)
        self._optimizer = optimizer
        self._context = context
        self._tensor = tensor
        self._probe = probe
        self._data: StepData | None = None
        self._sums = self._sums_ahead = StepSums()

    @property
    def data(self) -> StepData:
        """The samples of the step that runs."""
        assert self._data is not None
        return self._data

    @property
    def _axis(self) -> TensorAxis:
        """The tensor ranks."""
        return TensorAxis(
            group=self._tensor,
            rank=self.place.tp,
            size=self.module.grid.tp,
            sequence_parallel=self.module.sequence_parallel,
        )

    @property
    def predictions(self) -> Sequence[Prediction]:
        """What the language model would write of samples that are scored."""
        return self._sums.predictions

    def begin(
        self,
        data: NumberedData,
        *,
        scores: bool,
        following: NumberedData | None = None,
        phase: PlanPhase = "both",
    ) -> None:
        """Take the samples of the step to come.

        Args:
            data: of the step.
            scores: whether each label is also compared with the argmax, as in an evaluation.
            following: those of the step after it, for what is made ahead.
            phase: what of the plan will be run; with "next" nothing of the step itself.
        """
        self._data = data.data
        steps = (data, *(() if following is None else (following,)))
        self._microbatches = tuple(batch for step in steps for batch in step.data.microbatches)
        self._step_keys = tuple(key for step in steps for key in self._keys_of(step))
        self._scores = scores
        self._sums = StepSums() if scores or phase == "next" else self._sums_ahead
        if not scores:
            self._sums_ahead = StepSums()

    def _keys_of(self, step: NumberedData) -> list[Tensor | None]:
        """Return for each microbatch of a step the key of what is drawn in it; None for nothing."""
        draws = step.number is not None and self.part.draw_keys.is_read and not self.module.is_of_teacher
        key = step_key(self.job.settings.run.seed, step.number) if draws and step.number is not None else None
        return [key] * len(step.data.microbatches)

    def _sums_of(self, microbatches: Sequence[int]) -> StepSums:
        """Return where a pass is counted: in its own step, which may be the next one."""
        return self._sums if microbatches[0] < len(self.data.microbatches) else self._sums_ahead

    def share(self) -> LocalStats:
        """Return this rank's share of what the step adds up to."""
        sums = self._sums
        return LocalStats(
            loss=torch.stack(sums.losses).sum().double() if sums.losses else 0.0,
            label_weight=sums.label_weight,
            rows={self.module.name: sums.rows},
            counts={
                "truncated": sums.truncated,
                "right": sum(prediction.right for prediction in sums.predictions),
                "samples": len(sums.predictions),
            },
            extra_sums=sums.extra,
        )

    @abc.abstractmethod
    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a pass, as `StageProgram` says."""

    def _recorded(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Have the probe record the rows of a pass, and return those that the stage sends."""
        if self._probe is None or self._scores:
            return rows
        return self._probe.record_pass(self.part.id, microbatches, inputs, rows)

    def defer_weight_grads(self) -> AbstractContextManager[DeferredWeightGrads]:
        """Defer weight gradients, as `StageProgram` says."""
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

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss of which the gradient is taken; the optimizer divides by the scale."""
        scale = 1.0 if self._optimizer is None else self._optimizer.loss_scale
        return loss if scale == 1.0 else loss * scale

    def _outputs(self, rows: Tensor) -> dict[str, Tensor]:
        """Return rows by edge, in the precision in which they travel."""
        rows = rows.to(self._dtype)
        return {edge.name: rows for edge in self._edges}
