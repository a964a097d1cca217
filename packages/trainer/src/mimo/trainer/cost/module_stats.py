"""How many parameters a job's modules have and how many operations a step takes, part by part; nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mimo.trainer.cost.from_shapes import part_of
from mimo.trainer.cost.operations import stage_operations
from mimo.trainer.cost.parameter_names import names_of
from mimo.trainer.cost.sample_stats import SampleStats, step_samples
from mimo.trainer.job.job import Job, JobModule


@attrs.frozen(kw_only=True)
class ModuleStats:
    """Parameters and operations of a part of a module, on all ranks together, each copy counted once.

    Args:
        module: its name.
        part: name of one of its plugin's parts; the module's name for what belongs to none.
        parameters: number of elements.
        trained: number of those that are trained.
        forward: operations of the forwards of a step, two for a multiplication and an addition.
        backward: of the backwards, without recomputation.
        repeated: of recomputation.
    """

    module: str
    part: str
    parameters: int = 0
    trained: int = 0
    forward: float = 0
    backward: float = 0
    repeated: float = 0

    def __add__(self, other: ModuleStats) -> ModuleStats:
        """Return the sum of both, under the first's names."""
        return ModuleStats(
            module=self.module,
            part=self.part,
            parameters=self.parameters + other.parameters,
            trained=self.trained + other.trained,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            repeated=self.repeated + other.repeated,
        )


def module_stats(job: Job, samples: SampleStats) -> Iterator[ModuleStats]:
    """Yield the parameters of each part of each module, and its operations in a step of samples like these."""
    share = step_samples(job, samples) / len(samples.lengths)
    for module in job.modules:
        stats = _parameters(module, job.row_width(module))
        for stage in job.stages_of(module.name):
            for part, done in stage_operations(job, stage, samples):
                before = stats.get(part, ModuleStats(module=module.name, part=part))
                stats[part] = attrs.evolve(
                    before,
                    forward=before.forward + share * done.forward,
                    backward=before.backward + share * done.backward,
                    repeated=before.repeated + share * done.repeated,
                )
        yield from stats.values()


def _parameters(module: JobModule, hidden: int) -> dict[str, ModuleStats]:
    found: dict[str, ModuleStats] = {}
    for one in names_of(module, hidden):
        part = part_of(module, one.name.removeprefix(f"{module.name}."))
        own = ModuleStats(module=module.name, part=part, parameters=one.elements, trained=one.elements * one.trained)
        found[part] = found[part] + own if part in found else own
    return found
