"""A step that waits for a restart: what all ranks know of it, as plain data of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mimo.trainer.job.job import Job
from mimo.trainer.rerun.comparison import plain_computation, read_computation
from mimo.trainer.step.probe import Computation

_FIRST_HAND_ON = 1 << 16
"""`data.hand_on` of runs of which `layout_of` doesn't say it: what the default was at first."""


@attrs.frozen(kw_only=True)
class PendingStep:
    """What all ranks know of a step that came to the same result twice, which can't be right.

    Args:
        step: its number.
        layout: what `layout_of` returns for the job; in another layout ranks hold other parts of the model.
        reason: why the result can't be right.
        tolerance: relative difference of two runs that is no fault.
        ranks: those whose device may be at fault.
        computation: what went wrong first, where it is known.
        devices: for each rank, the devices that have computed the result, in the order in which they did.
        values: the numbers of the result by name, as text, because JSON has no nan and no infinity.
    """

    step: int
    layout: str
    reason: str
    tolerance: float
    ranks: tuple[int, ...]
    computation: Computation | None
    devices: tuple[tuple[str, ...], ...]
    values: Mapping[str, str]

    @property
    def first_devices(self) -> tuple[str, ...]:
        """The devices on which the result was first seen, by rank."""
        return tuple(known[0] for known in self.devices)

    def is_settled_on(self, devices: Sequence[str]) -> bool:
        """Return whether the same result on these devices, by rank, clears the first device of every suspect rank.

        Where suspect ranks have only swapped devices, the bad one may still be among them.
        """
        first = self.first_devices
        return {first[rank] for rank in self.ranks}.isdisjoint(devices[rank] for rank in self.ranks)

    def on(self, devices: Sequence[str]) -> PendingStep:
        """Return this step with the devices that have now computed the result too, by rank."""
        known = tuple(tuple(dict.fromkeys([*old, new])) for old, new in zip(self.devices, devices, strict=True))
        return attrs.evolve(self, devices=known)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            **{key: getattr(self, key) for key in ("step", "layout", "reason", "tolerance")},
            "ranks": list(self.ranks),
            "deed": None if self.computation is None else plain_computation(self.computation),
            "devices": [list(known) for known in self.devices],
            "values": dict(self.values),
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> PendingStep:
        """Return what `plain` gave."""
        fields = dict(plain)
        computation = fields.pop("deed")
        return cls(
            **{
                **fields,
                "ranks": tuple(plain["ranks"]),
                "computation": None if computation is None else read_computation(computation),
                "devices": tuple(map(tuple, plain["devices"])),
            }
        )


def layout_of(job: Job) -> str:
    """Return what stands for how a job is laid out: who computes what of which samples."""
    found = hashlib.blake2b(digest_size=8)
    for plan in job.plans:
        for rank in sorted(job.graph.ranks):  # messages may go in another order in a later version
            done = (one for one in plan.actions_of(rank) if one.kind not in ("send", "receive"))
            found.update(f"{rank} {[(one.kind, one.module, one.stage, one.microbatches) for one in done]};".encode())
    for module in job.modules:
        found.update(f"{module.name} {module.grid} {module.sequence_parallel};".encode())
        if module.round_rows != 1:
            found.update(f"{module.round_rows};".encode())
    run = job.settings.run
    found.update(f"{job.world} {run.global_batch} {run.micro_batch} {run.precision}".encode())
    hand_on = job.settings.data.hand_on
    if job.balance != "count" or hand_on != _FIRST_HAND_ON:  # others as they always were
        found.update(f" {job.balance} {hand_on}".encode())
    if run.batch_tokens:
        found.update(f" {run.batch_tokens} {run.micro_tokens}".encode())
    return found.hexdigest()
