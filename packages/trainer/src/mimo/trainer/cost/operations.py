"""Operations of a stage over given samples, by formula: of its forward, its backward, and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mimo.topology import StageId
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import op_costs_with_training
from mimo.trainer.job.job import Job


@attrs.frozen(kw_only=True)
class Operations:
    """Operations on all ranks together, two for a multiplication and an addition.

    Args:
        forward: of the forward.
        backward: of the backward, without what it computes again: none of what nothing before needs a gradient of, and
            no weight gradients of what is frozen.
        repeated: what it computes again.
    """

    forward: float = 0
    backward: float = 0
    repeated: float = 0

    def __add__(self, other: Operations) -> Operations:
        """Return what both take."""
        return Operations(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            repeated=self.repeated + other.repeated,
        )


def stage_operations(job: Job, stage: StageId, samples: SampleStats) -> Iterator[tuple[str, Operations]]:
    """Yield what each part of a stage does with samples, each of them once."""
    for part, work, trains, reached in op_costs_with_training(job, stage, samples):
        yield (
            part,
            Operations(
                forward=work.forward,
                backward=work.input_gradient * reached + work.weight_gradient * trains,
                repeated=work.repeated * reached,
            ),
        )


def module_operations(job: Job, module: str, samples: SampleStats) -> Operations:
    """Return what all stages of a module do with samples, each of them once."""
    stages = job.stages_of(module)
    return sum((found for stage in stages for _, found in stage_operations(job, stage, samples)), Operations())
