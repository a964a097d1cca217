"""How many parameters a job's modules have and how many operations a step takes, part by part; nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mimo.trainer.cost.flops_from_shapes import part_of
from mimo.trainer.cost.operations import stage_operations
from mimo.trainer.cost.parameter_names import names_of
from mimo.trainer.cost.sample_stats import Typical
from mimo.trainer.job.job import Job, JobModule


@attrs.frozen(kw_only=True)
class Amounts:
    """What a part of a module is and does, on all ranks together, each copy counted once.

    Args:
        module: its name.
        part: one of its plugin's names to freeze by; the module's name for what belongs to none.
        parameters: how many numbers they are.
        trained: of these, those that are trained.
        forward: operations of the forwards of a step, two for a multiplication and an addition.
        backward: likewise of the backwards, without what they compute again.
        repeated: what they compute again.
    """

    module: str
    part: str
    parameters: int = 0
    trained: int = 0
    forward: float = 0
    backward: float = 0
    repeated: float = 0

    def __add__(self, other: Amounts) -> Amounts:
        """Return what both are and do, under the first's names."""
        return Amounts(
            module=self.module,
            part=self.part,
            parameters=self.parameters + other.parameters,
            trained=self.trained + other.trained,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            repeated=self.repeated + other.repeated,
        )


def amounts(job: Job, typical: Typical) -> Iterator[Amounts]:
    """Yield what each part of each module is, and does in a step of samples like the typical ones."""
    share = job.settings.run.global_batch / len(typical.lengths)
    for module in job.modules:
        found = _parameters(module, job.hidden)
        for stage in job.stages_of(module.name):
            for part, done in stage_operations(job, stage, typical):
                before = found.get(part, Amounts(module=module.name, part=part))
                found[part] = attrs.evolve(
                    before,
                    forward=before.forward + share * done.forward,
                    backward=before.backward + share * done.backward,
                    repeated=before.repeated + share * done.repeated,
                )
        yield from found.values()


def _parameters(module: JobModule, hidden: int) -> dict[str, Amounts]:
    found: dict[str, Amounts] = {}
    for one in names_of(module, hidden):
        part = part_of(module, one.name.removeprefix(f"{module.name}."))
        own = Amounts(module=module.name, part=part, parameters=one.numbers, trained=one.numbers * one.trained)
        found[part] = found[part] + own if part in found else own
    return found
