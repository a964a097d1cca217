"""Records the norms of what one rank computes in one run of a step, so that two runs can be compared.

Each norm is one pass over small data and stays where it was computed: the host waits for none until values are read.
R rows, H columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from mimo.optimizer import Sums
from mimo.topology import StageId
from mimo.trainer.config.rerun_settings import Corrupted, InjectSettings
from mimo.trainer.step.probe import Computation

_TINY = 2.0**-50
"""Norms from here on lose nothing of squares that float32 can't hold, being too small."""
POWER = 8
"""Of what passes come to, in sums that all ranks add to. The largest of all passes is no sum, but the eighth root of
the sum of eighth powers is at least that, and at most 3.2 times that for 10,000 passes. The eighth power of every
normal number of float32 is a normal one of float64, the largest (2^128 - 2^104) and the least (2^-126) included."""


class Injector:
    """Corrupts numbers where settings say so.

    Args:
        settings: what, where and when.
        rank: this rank.
        device: the identity of what it computes on.
    """

    def __init__(self, settings: InjectSettings, *, rank: int, device: str) -> None:
        self._settings = settings
        self._left = settings.times or None
        self._is_here = settings.step > 0 and settings.rank == rank and settings.device in ("", device)
        self._corrupts = False

    def begin(self) -> None:
        """Begin a run of a step."""
        if self._corrupts and self._left is not None:
            self._left -= 1
        self._corrupts = False

    def corrupt(self, what: Corrupted, value: Tensor) -> Tensor:
        """Return what is to be taken for ``value``."""
        return value * (self._settings.factor or float("nan")) if what == self._settings.what else value

    def reaches(self, rows: Tensor) -> bool:
        """Tell whether what is to be corrupted of a pass is there: the tower of an encoder has no gradients."""
        return self._settings.what == "forward" or rows.requires_grad

    def meets(self, step: int, module: str, microbatches: Sequence[int]) -> bool:
        """Tell whether a pass is to be corrupted."""
        wanted = self._settings
        found = (
            self._is_here
            and self._left != 0
            and (step, module) == (wanted.step, wanted.module)
            and wanted.microbatch in microbatches
        )
        self._corrupts = self._corrupts or found
        return found


@attrs.define(kw_only=True)
class _Norms:
    """The norms of the parts of something, in float64, and how many elements these parts have."""

    parts: list[Tensor] = attrs.field(factory=list)
    elements: int = 0


class NormRecorder:
    """A `StepProbe` that records the norms of what this rank computes while it trains.

    Args:
        microbatches: of a step at most; those that a module makes ahead count on from there.
        injector: corrupts what is recorded where settings say so.
    """

    def __init__(self, *, microbatches: int, injector: Injector) -> None:
        self._microbatches = microbatches
        self._injector = injector
        self._now: dict[Computation, _Norms] = {}
        self._ahead: dict[Computation, _Norms] = {}
        self._steps: tuple[int | None, int | None] = (None, None)

    def begin(self, step: int | None, ahead: int | None) -> None:
        """Begin to record a run of ``step``, in which some of step ``ahead`` is made, as `StepProbe` says.

        Args:
            step: None where only something of the other is made.
            ahead: None for none.
        """
        self._injector.begin()
        self._now = self._ahead if step is not None and self._steps[1] == step else {}
        self._ahead = {}
        self._steps = (step, ahead)

    def record_pass(
        self, stage: StageId, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], rows: Tensor
    ) -> Tensor:
        """Record the rows [R, H] of a forward, and in its backward the gradients of its inputs; return the rows."""
        step, served, is_ahead = self._placed(microbatches)
        if step is None:
            return rows
        if self._injector.reaches(rows) and self._injector.meets(step, stage.module, served):
            rows = self._injector.corrupt("forward", rows)
            if rows.requires_grad:
                rows.register_hook(partial(self._injector.corrupt, "gradient"))
        computation = Computation(kind="forward", module=stage.module, stage=stage.stage, microbatches=served)
        self._record(computation, rows, ahead=is_ahead)
        back = attrs.evolve(computation, kind="backward")
        for value in inputs.values():
            if value.requires_grad:
                value.register_hook(partial(self._record, back))
        return rows

    def record_loss(self, stage: StageId, microbatches: tuple[int, ...], loss: Tensor) -> None:
        """Record the loss of a pass."""
        step, served, is_ahead = self._placed(microbatches)
        if step is not None:
            computation = Computation(kind="loss", module=stage.module, stage=stage.stage, microbatches=served)
            self._record(computation, loss, ahead=is_ahead)

    def record_gradients(self, module: str, sums: Sums, stages: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Record this rank's own gradients of parameters, as `mimo.optimizer.ModuleParameters.observe` says."""
        if self._steps[0] is not None and gradients:
            computation = Computation(kind="gradients" if sums == "lanes" else "tied", module=module, stage=min(stages))
            norms = torch._foreach_norm(list(gradients))  # noqa: SLF001 - what torch.nn.utils calls too
            elements = sum(gradient.numel() for gradient in gradients)
            self._record(computation, torch.stack([norm.float() for norm in norms]), elements=elements)

    def _placed(self, microbatches: tuple[int, ...]) -> tuple[int | None, tuple[int, ...], bool]:
        """Return the step of a pass, None if nothing of it is recorded, its microbatches there, and if it is ahead."""
        is_ahead = microbatches[0] >= self._microbatches
        return self._steps[is_ahead], tuple(one - self._microbatches * is_ahead for one in microbatches), is_ahead

    @torch.no_grad()
    def _record(
        self, computation: Computation, value: Tensor, *, ahead: bool = False, elements: int | None = None
    ) -> None:
        notes = self._ahead if ahead else self._now
        found = notes.setdefault(computation, _Norms())
        found.parts.append(norm_of(value.detach(), waits=value.device.type != "cpu"))
        found.elements += value.numel() if elements is None else elements

    def stacked(self) -> tuple[tuple[Computation, ...], Tensor]:
        """Return the computations of the last run and the norm [N] of each; the host waits for nothing."""
        norms = [
            notes.parts[0] if len(notes.parts) == 1 else torch.linalg.vector_norm(torch.stack(notes.parts))
            for notes in self._now.values()
        ]
        return tuple(self._now), torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def sums(self, wanted: Sequence[Computation], *, loss_scale: float) -> Tensor:
        """Return what this rank adds to the sums [C] of all ranks: `POWER` of what each pass comes to.

        A pass comes to the norm of its rows over the square root of how many elements they have, one without any to 0.

        Args:
            wanted: without microbatches, in the order of the sums.
            loss_scale: by which gradients are too large.
        """
        places = {computation: place for place, computation in enumerate(wanted)}
        _, norms = self.stacked()
        rooted, at, found = [], [], []
        for index, (computation, notes) in enumerate(self._now.items()):
            place = places.get(Computation(kind=computation.kind, module=computation.module, stage=computation.stage))
            if place is not None and notes.elements:
                rooted.append(_root(computation, notes.elements, loss_scale))
                at.append(place)
                found.append(index)
        total = torch.zeros(len(wanted), dtype=torch.float64, device=norms.device)
        if found:
            by = torch.tensor(rooted, dtype=torch.float64).to(norms.device, non_blocking=True)
            where = torch.tensor([found, at]).to(norms.device, non_blocking=True)
            total.index_add_(0, where[1], (norms[where[0]] / by) ** POWER)
        return total

    def sizes(self, *, loss_scale: float) -> dict[Computation, float]:
        """Return what each pass came to, for which the device is waited for."""
        found = {}
        for (computation, norm), notes in zip(self.values().items(), self._now.values(), strict=True):
            if notes.elements:
                found[computation] = norm / _root(computation, notes.elements, loss_scale)
        return found

    def values(self) -> dict[Computation, float]:
        """Return the same as numbers, for which the device is waited for."""
        computations, norms = self.stacked()
        return dict(zip(computations, norms.tolist(), strict=True))


def _root(computation: Computation, elements: int, loss_scale: float) -> float:
    """Return what a norm is divided by, so that passes of any size and scale of the loss can be compared."""
    return math.sqrt(elements) * (1.0 if computation.kind == "forward" else loss_scale)


def norm_of(value: Tensor, *, waits: bool) -> Tensor:
    """Return the norm of a tensor of any shape in float64; not finite only if one of its elements isn't.

    Squares are added up in float32, which is fast and fails from 2^64 on, and for what is tiny. Such a norm is taken
    anew in float64 where its value is at hand; otherwise, as the host is to wait for nothing, the largest element
    stands for it.

    Args:
        value: of floating numbers.
        waits: whether the host would have to wait for values.
    """
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.float32).double()
    if waits and value.numel():
        holds = norm.isfinite() & (norm > _TINY)
        norm = torch.where(holds, norm, torch.linalg.vector_norm(value, math.inf).double())
    elif not waits and not _TINY < norm.item() < math.inf:
        norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    return norm


class Bounds:
    """The largest that each computation's norm has been of late, on the device.

    Args:
        steps: after as many, what was larger before counts half.
    """

    def __init__(self, steps: int) -> None:
        self._decay = 0.5 ** (1 / steps)
        self._computations: tuple[Computation, ...] = ()
        self._largest = torch.zeros(0)

    def add(self, recorder: NormRecorder) -> None:
        """Take in the step that was accepted."""
        computations, norms = recorder.stacked()
        if computations == self._computations:
            self._largest = torch.maximum(self._largest * self._decay, norms)
        else:
            self._computations, self._largest = computations, norms

    def values(self) -> dict[Computation, float]:
        """Return them by computation, for which the device is waited for."""
        return dict(zip(self._computations, self._largest.tolist(), strict=True))
