"""Runs in which single bits of single numbers flip, by hooks that know nothing of the rerun machine.

Functions for `pool.Pool.run`.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import torch
from jobs import CPU, make_job
from rerunning import with_rerun
from tables import Table, table
from torch import Tensor

from mimo.launch import ProcessInfo
from mimo.topology import ModuleGraph, StageId
from mimo.trainer import Trainer
from mimo.trainer.runtime import (
    RerunDriver,
    RerunStateMachine,
    RunState,
    check_source,
    find_source,
    resume,
    save_step,
    share_source,
)

QUIET_STEPS = 6
"""Before the first flip, so that passes have a past."""

Bits: TypeAlias = Literal["huge", "growing", "shrinking", "sign", "fraction"]
"""Which bits flip: of the exponent, those that make a number 2^32 times as large or more, or not finite; others that
make it larger; those that make it smaller. The others are the sign's and the fraction's."""

_EXPONENT = range(23, 31)
_HUGE = 28


@attrs.frozen(kw_only=True)
class Spot:
    """Where a bit flips: in what a stage makes, sends back, or is given back, on a rank, in a pass of a step."""

    step: int
    stage: StageId
    what: Literal["forward", "backward", "gradients"]
    rank: int
    microbatch: int


@attrs.frozen(kw_only=True)
class Flip:
    """A bit that has flipped, and the number before and after."""

    spot: Spot
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times as large the number is."""
        return abs(self.after / self.before)

    def is_named_by(self, event: Mapping[str, Any]) -> bool:
        """Return whether an event names this flip."""
        return (
            (event["step"], event["verdict"]) == (self.spot.step, "transient")
            and (event["module"], event["stage"]) == (self.spot.stage.module, self.spot.stage.stage)
            and (event["what"], event["ranks"]) == (self.spot.what, [self.spot.rank])
            and event["microbatches"] == ([] if self.spot.what == "gradients" else [self.spot.microbatch])
        )


def settings_of(modules: Mapping[str, Mapping[str, Any]], directory: Path, *, steps: int, **rerun: Any) -> Table:
    """Return a run of a small model over ragged samples, two microbatches a step; its learning rate warms up."""
    found = table(modules, microbatches=2, pictures="many")
    for name in modules:
        found["modules"][name]["config"] |= {"layers": 2}
    lanes = 24 // (2 * found["run"]["micro_batch"])
    found["run"] |= {"steps": steps, "global_batch": 8 * lanes, "micro_batch": 4}
    found["optimizer"] |= {"lr": 3e-3, "lr_warmup_steps": 20}
    return with_rerun(found, directory, mode="validate", **rerun)


def spots(graph: ModuleGraph, count: int, seed: int) -> list[Spot]:
    """Draw where bits flip, the same on all ranks: no two in one step."""
    rng = random.Random(seed)
    found, step = [], QUIET_STEPS
    for _ in range(count):
        step += rng.randint(1, 3)
        stage = rng.choice(graph.stages)
        sends_back = any(edge.gradient for edge in graph.inputs(stage))
        found.append(
            Spot(
                step=step,
                stage=stage,
                what=rng.choice(("forward", "backward" if sends_back else "gradients")),
                rank=rng.choice(graph.stage_ranks(stage)),
                microbatch=rng.randrange(2),
            )
        )
    return found


def run_with_flips(rank: int, settings: Table, bits: Bits, count: int, seed: int) -> list[Flip]:
    """Train until all bits have flipped, and return those of this rank, in the order of steps."""
    trainer, machine = _begin(rank, settings)
    driver = RerunDriver(machine, trainer)
    flipper = _Flipper(bits, random.Random(f"{seed} {rank}"))
    drawn = spots(trainer.job.graph, count, seed)
    for stage, part in trainer.model.parts.items():
        part.module.register_forward_pre_hook(flipper.before)
        part.module.register_forward_hook(flipper.after(stage))
    here = {spot.step: spot for spot in drawn if spot.rank == rank}
    for step in range(1, drawn[-1].step + 1):
        flipper.begin(here.get(step))
        driver.train(step)
    return flipper.flips


def run_with_a_number(rank: int, settings: Table, stage: StageId, step: int, value: float) -> None:
    """Train until a step in which a number of what a stage makes is another, in its first run only."""
    trainer, machine = _begin(rank, settings)
    driver = RerunDriver(machine, trainer)
    due = [False]

    def hook(_module: torch.nn.Module, _args: Any, rows: Tensor) -> Tensor:
        if not due[0] or not rows.numel():
            return rows
        due[0] = False
        changed = rows.clone()
        changed.detach().view(-1)[0] = value
        return changed

    (part,) = (part for part in trainer.model.parts.values() if part.id == stage)
    part.module.register_forward_hook(hook)
    for number in range(1, step + 1):
        due[0] = number == step
        driver.train(number)


def run_clean(rank: int, settings: Table, first: int, last: int) -> float:
    """Train steps of a run, resuming what it has saved if they are not its first; return the last loss."""
    trainer, machine = _begin(rank, settings)
    driver, state = RerunDriver(machine, trainer), RunState()
    if first > 1:
        source = share_source(find_source(trainer.job.settings))
        assert source is not None
        check_source(trainer.job, source)
        machine.expect(source.manifest, source.folder)
        state = resume(trainer, [machine], source).state
        assert source.first_step == first
    losses = [driver.train(step).info.loss for step in range(first, last + 1)]
    save_step(trainer, state, [machine], last)
    return losses[-1]


def _begin(rank: int, settings: Table) -> tuple[Trainer, RerunStateMachine]:
    job = make_job(settings)
    machine = RerunStateMachine(job, ProcessInfo(rank=rank, world=job.world, local_rank=rank))
    return Trainer(job, rank=rank, device=CPU, probe=machine.recorder), machine


class _Flipper:
    """Flips one bit in a step on one rank, in its first run; hooks of the stages' modules."""

    def __init__(self, bits: Bits, rng: random.Random) -> None:
        self._bits: Bits = bits
        self._rng = rng
        self._spot: Spot | None = None
        self._passes: Counter[StageId] = Counter()
        self.flips: list[Flip] = []

    def begin(self, spot: Spot | None) -> None:
        """Take note that a step begins, and where in it a bit is to flip."""
        self._spot = spot
        self._passes.clear()

    def before(self, module: torch.nn.Module, args: Sequence[Any]) -> None:
        """Keep what a pass is given, for its gradients."""
        del module
        self._given = [one for arg in args for one in (arg.values() if isinstance(arg, dict) else [arg])]

    def after(self, stage: StageId) -> Any:
        """Return the hook of a stage's forward."""

        def hook(_module: torch.nn.Module, _args: Any, rows: Tensor) -> Tensor:
            spot, microbatch = self._spot, self._passes[stage]
            self._passes[stage] += 1
            if spot is None or (spot.stage, spot.microbatch) != (stage, microbatch):
                return rows
            if spot.what == "forward":
                return self._flip(rows)
            if spot.what == "gradients":
                rows.register_hook(self._flip)
                return rows
            (given,) = (one for one in self._given if isinstance(one, Tensor) and one.requires_grad)
            given.register_hook(self._flip)
            return rows

        return hook

    def _flip(self, value: Tensor) -> Tensor:
        """Return a tensor in which one bit of one number, other than 0, has flipped; once in a step."""
        spot, flat = self._spot, value.detach().flatten()
        places = flat.nonzero().flatten().tolist()
        if spot is None or not places:
            return value
        self._spot = None
        while True:
            place = self._rng.choice(places)
            before = float(flat[place])
            if among := bits_of(before, self._bits):
                break
        after = flipped(before, self._rng.choice(among))
        self.flips.append(Flip(spot=spot, before=before, after=after))
        changed = value.clone(memory_format=torch.contiguous_format)
        changed.detach().view(-1)[place] = after
        return changed


def bits_of(value: float, bits: Bits) -> list[int]:
    """Return the bits of a number of float32 that are of a kind."""
    if bits == "sign":
        return [31]
    if bits == "fraction":
        return list(range(_EXPONENT.start))
    word = _word(value)
    rising = [bit for bit in _EXPONENT if not word >> bit & 1]
    huge = [bit for bit in rising if bit >= _HUGE or not math.isfinite(flipped(value, bit))]
    return {
        "huge": huge,
        "growing": [bit for bit in rising if bit not in huge],
        "shrinking": [bit for bit in _EXPONENT if word >> bit & 1],
    }[bits]


def flipped(value: float, bit: int) -> float:
    """Return a number of float32 with another bit."""
    found: float = struct.unpack("<f", struct.pack("<I", _word(value) ^ 1 << bit))[0]
    return found


def _word(value: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found
