"""What may be recorded of the computations of a step, and how its one message carries it to all ranks.

A `StepProbe` sees the rows, losses and gradients of one rank as they are computed. The trainer works without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import attrs
from torch import Tensor

from mimo.optimizer import Sums
from mimo.topology import ModuleGraph, StageId

Kind: TypeAlias = Literal["forward", "loss", "backward", "tied", "gradients"]
"""The rows of a pass; its loss; the gradients that it sends back; gradients of parameters, before they are summed over
stages, and over lanes."""

PASSES = "rerun.passes"
"""Name of the recorded sums in the step's message."""


@attrs.frozen(kw_only=True)
class Computation:
    """Something that a rank computed in a step; ``microbatches`` are those of a pass, and none for gradients."""

    kind: Kind
    module: str
    stage: int
    microbatches: tuple[int, ...] = ()


class StepProbe(Protocol):
    """Records what one rank computes while it trains."""

    def begin(self, step: int | None, ahead: int | None) -> None:
        """Begin to record a run of ``step``; what was recorded before is dropped, but for what was made ahead for it.

        Args:
            step: None where only something of the following step is made.
            ahead: the following step, of which some is made in this run; None for none.
        """
        ...

    def record_pass(
        self, stage: StageId, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], rows: Tensor
    ) -> Tensor:
        """Record the rows [R, H] of a forward, and in its backward the gradients of its inputs.

        Returns:
            The rows that the stage sends.
        """
        ...

    def record_loss(self, stage: StageId, microbatches: tuple[int, ...], loss: Tensor) -> None:
        """Record the loss of a pass."""
        ...

    def record_gradients(self, module: str, sums: Sums, stages: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Record this rank's own gradients of parameters, as `mimo.optimizer.ModuleParameters.observe` says."""
        ...

    def sums(self, wanted: Sequence[Computation], *, loss_scale: float) -> Tensor:
        """Return what this rank adds to the sums [C] of all ranks.

        Args:
            wanted: without microbatches, in the order of the sums.
            loss_scale: by which gradients are too large.
        """
        ...


def computations(graph: ModuleGraph) -> tuple[Computation, ...]:
    """Return the computations that the step's message has sums of, in the order in which a step does them.

    Args:
        graph: modules as they are built; those without a seam count one stage more, of which the sum is 0, so that the
            step's message has the same length whether an encoder is divided at its seam or not.
    """
    modules = map(graph.by_name.__getitem__, graph.order)
    stages = [StageId(module.name, stage) for module in modules for stage in range(module.stages + (not module.seam))]
    forward = tuple(Computation(kind="forward", module=stage.module, stage=stage.stage) for stage in stages)
    backward = tuple(attrs.evolve(computation, kind="backward") for computation in reversed(forward))
    return (*forward, *backward, *(attrs.evolve(computation, kind="gradients") for computation in backward))
