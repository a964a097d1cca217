"""What a step's loss is the sum of beside the labels: what is learned from teachers, and the losses of generators.

Each has a global count by which its sum is divided: a teacher's that of the labels, a generator's that of its targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mimo.data import SampleLayout
from mimo.model import GeneratorSpec
from mimo.optimizer.runtime import ReducedStats
from mimo.trainer.job.job import Job, JobModule


def divergence_name(teacher: JobModule) -> str:
    """Return by what name the sum of the divergences from a teacher is known."""
    return f"{teacher.name}.divergence"


def hidden_name(teacher: JobModule) -> str:
    """Return by what name the sum of the losses by a teacher's hidden rows is known."""
    return f"{teacher.name}.hidden"


def _taught_names(job: Job) -> list[str]:
    """Return by what names what is learned from teachers is known."""
    found = list[str]()
    for teacher in job.teachers:
        assert teacher.distil is not None
        found += [divergence_name(teacher)] * (teacher.distil.top_k > 0)
        found += [hidden_name(teacher)] * teacher.distil.compares_hidden
    return found


def loss_name(generator: JobModule) -> str:
    """Return by what name the sum of a generator's losses is known."""
    return f"{generator.name}.loss"


def targets_name(generator: JobModule) -> str:
    """Return by what name the number of a generator's targets is known."""
    return f"{generator.name}.targets"


def term_sums(job: Job) -> Mapping[str, int]:
    """Return what ranks sum for these terms in a step's message, by name its length, in the message's order."""
    names = [*_taught_names(job), *map(loss_name, job.generators), *map(targets_name, job.generators)]
    return dict.fromkeys(names, 1)


def term_losses(job: Job, sums: ReducedStats) -> Mapping[str, float]:
    """Return the mean of each term by its name, of one without a target 0."""
    found = {name: float(sums.extra_sums[name]) / sums.divisor for name in _taught_names(job)}
    for generator in job.generators:
        targets = float(sums.extra_sums[targets_name(generator)])
        found[loss_name(generator)] = float(sums.extra_sums[loss_name(generator)]) / (targets or 1.0)
    return found


def target_counts(generator: JobModule, layout: SampleLayout) -> list[int]:
    """Return how many targets each item has that a generator is to make of a sample."""
    assert isinstance(generator.spec, GeneratorSpec), generator.name
    sizes = [item.info.size for item in layout.made(generator.modality)]
    return [generator.spec.targets(generator.config, size) for size in sizes]


def loss_factor(generator: JobModule, layouts: Sequence[SampleLayout]) -> float:
    """Return by what the sum of a generator's losses enters the loss of a step.

    All gradients of a step are divided by the weight of its labels (by 1 where there are none), so what is to be
    divided by the generator's own count is multiplied by their ratio first. It follows from the samples of the step,
    which every rank knows: nothing is sent for it.

    Args:
        generator: whose.
        layouts: of all samples of the step.
    """
    targets = sum(sum(target_counts(generator, layout)) for layout in layouts if not layout.is_broken)
    labels = sum(layout.label_weight for layout in layouts) or 1.0
    return generator.loss_weight * labels / targets if targets else 0.0
