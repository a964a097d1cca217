"""What stages have in common that are given items: encoders, and generators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mimo.hooks import UserError
from mimo.model.runtime import item_keys
from mimo.topology import Coordinates
from mimo.topology.device_copies import to_device
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.items.handed_on import hand_on
from mimo.trainer.items.prepared import Item
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.step.programs.program import Program


class ItemProgram(Program):
    """A stage of a module that is given items."""

    @property
    def takes_items(self) -> bool:
        """Whether items enter here: on the first stage, and on a generator's last, which compares with them."""
        stage = self.part.stage
        return stage.is_first or (self.module.is_generator and stage.is_last)

    def _item_keys(self, microbatches: Sequence[int]) -> Tensor | None:
        """Return by what is drawn for the items of a pass, [N]; None for nothing."""
        found = []
        for microbatch in microbatches:
            key = self._step_keys[microbatch]
            if key is None:
                return None
            infos = [item.info for item in self._microbatches[microbatch].items(self.module, self.place.dp)]
            found.append(item_keys(key, [info.sample for info in infos], [info.index for info in infos]))
        return torch.cat(found)

    def _prepare(self, batches: Sequence[Microbatch]) -> list[Item]:
        """Return the items of a pass, where they enter the module; ranks may meet to hand on what each has decoded."""
        if not self.takes_items:
            return []
        alone, shared = dict[int, Item](), dict[int, Item]()
        fault: UserError | None = None
        total, meets = 0, False
        for batch in batches:
            numbers, is_shared = batch.own_items(self.module, self.place)
            meets = meets or is_shared
            try:
                for number in numbers if fault is None else ():
                    item = batch.prepare_one(self.module, self.place.dp, number)
                    (shared if is_shared else alone)[total + number] = on_device(item, self.job, self.device)
            except UserError as error:
                fault = error
            total += len(batch.items(self.module, self.place.dp))
        if meets:
            groups = [group for group in (self._tensor, self._context) if group.size() > 1]
            alone |= hand_on(shared, fault, groups=groups, device=self.device)
        elif fault is not None:
            raise fault
        return [alone[number] for number in range(total)]


def places_of(programs: Iterable[Program]) -> list[tuple[JobModule, Coordinates]]:
    """Return for each stage of a rank where items enter its module, and where the rank stands in the module's grid."""
    taking = (program for program in programs if isinstance(program, ItemProgram) and program.takes_items)
    return [(program.module, program.place) for program in taking]


def on_device(item: Item, job: Job, device: torch.device) -> Item:
    """Return a prepared item where a rank computes; in reduced precision its floating numbers in that."""
    moved = {name: to_device(tensor, device) for name, tensor in item.items()}  # first, so that the device converts
    precision = job.settings.run.precision
    if precision == "fp32":
        return moved
    dtype = compute_dtype(precision)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in moved.items()}
