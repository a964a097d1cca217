"""Runs in which numbers go wrong on purpose, with restarts, as functions for `pool.Pool.run`."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from jobs import CPU, find
from tables import Table, world_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.hooks import Kind, RestartNeededError, ResultRejectedError, StepInfo
from mimo.launch import ProcessInfo
from mimo.model import ENCODERS
from mimo.testing import Pool
from mimo.trainer import Trainer, read_settings, resolve
from mimo.trainer.runtime import (
    RERUN_FILE,
    RerunDriver,
    RerunStateMachine,
    RunState,
    check_source,
    find_source,
    resume,
    save_step,
    share_source,
)


@attrs.frozen(kw_only=True)
class Ended:
    """How an attempt ended on one rank.

    Args:
        code: 0, or that of the error.
        text: of the error.
        steps: loss and gradient norm of each step that was taken.
        held: digest of all that this rank holds of weights and optimizer states.
        collectives: calls of collectives, from the first step on.
    """

    code: int
    text: str
    steps: list[tuple[float, float, bool]]
    held: str
    collectives: int


def attempt(rank: int, settings: Table, changed: bool = False) -> Ended:  # noqa: FBT002  # by position
    """Train on this rank as `mimo train` does, from where ``checkpoint.load`` says, until the end or an error of ours.

    Args:
        rank: this one.
        settings: encoders of `_find` are known beside those of `jobs.find`.
        changed: whether the samples are others than without.
    """
    job = resolve(read_settings(settings), find=_find)
    if changed:
        assert job.train is not None
        job = attrs.evolve(job, train=_Changed(job.train))
    machine = RerunStateMachine(job, ProcessInfo(rank=rank, world=job.world, local_rank=rank))
    trainer = Trainer(job, rank=rank, device=CPU, probe=machine.recorder)
    source = share_source(find_source(job.settings))
    if source is not None:
        check_source(job, source)
        machine.expect(source.manifest, source.folder)
        state = resume(trainer, [machine], source).state
    else:
        state = RunState()
    machine.save = partial(save_step, trainer, state, [machine])
    driver = RerunDriver(machine, trainer)
    counted = _count_collectives()
    infos: list[StepInfo] = []
    code, text = 0, ""
    try:
        steps = range(1 if source is None else source.first_step, job.settings.run.steps + 1)
        infos.extend(driver.train(step).info for step in steps)
    except (RestartNeededError, ResultRejectedError) as error:
        code, text = error.exit_code, str(error)
    return Ended(
        code=code,
        text=text,
        steps=[(info.loss, info.grad_norm, info.skipped) for info in infos],
        held=_digest(trainer),
        collectives=len(counted),
    )


@attrs.frozen
class _Changed:
    """The samples of a dataset in another order."""

    base: Any

    def __len__(self) -> int:
        return len(self.base)

    def tokens(self, sample: int) -> Any:
        return self.base.tokens(len(self) - 1 - sample)

    def weights(self, sample: int) -> Any:
        return self.base.weights(len(self) - 1 - sample)

    def infos(self, sample: int) -> Any:
        return [attrs.evolve(info, sample=sample) for info in self.base.infos(len(self) - 1 - sample)]

    def raw(self, sample: int, index: int) -> Any:
        return self.base.raw(len(self) - 1 - sample, index)

    def where(self, sample: int) -> str:
        return str(self.base.where(sample))


def _find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find encoders too whose rows follow from how often they were called and from what they draw."""
    noises = {"noisy-vit": _draws, "unsteady-vit": _does_as_it_likes}
    if kind is not ENCODERS or name not in noises:
        return find(kind, name, where)
    spec = find(kind, "vit", where)
    build = partial(_noisy, spec.build, noises[name])
    return attrs.evolve(spec, name=name, build=build, tensor=None, stages=None, context=None, recompute={})


def _draws() -> Tensor:
    return torch.randn(())


def _does_as_it_likes() -> Tensor:
    return torch.tensor(float(os.urandom(1)[0]))


def _noisy(build: Any, noise: Any, config: Any, hidden: int) -> nn.Module:
    module = build(config, hidden)
    module.register_buffer("calls", torch.zeros(()))
    run = type(module).forward

    def forward(self: Any, items: Any) -> Tensor:
        self.calls += 1
        rows: Tensor = run(self, items)
        factor: Tensor = 1 + 1e-3 * noise() + 1e-3 * self.calls
        return rows * factor

    module.__class__ = type("Noisy", (type(module),), {"forward": forward})
    return cast("nn.Module", module)


def _count_collectives() -> list[str]:
    """Return a list that grows with each collective or message of this process, which ends after its one run."""
    counted: list[str] = []
    for name in (
        *("all_reduce", "all_gather", "all_gather_single", "all_to_all_single", "broadcast", "reduce_scatter_single"),
        *("gather", "scatter", "isend", "irecv"),
    ):
        setattr(dist, name, _counting(getattr(dist, name), name, counted))
    return counted


def _counting(call: Any, name: str, counted: list[str]) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(name)
        return call(*args, **kwargs)

    return counting


def _digest(trainer: Trainer) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tree in (trainer.model_state(), trainer.optimizer.state()):
        for part in tree.values():
            for name, value in part.items():
                if isinstance(value, Tensor):
                    local = value.to_local() if isinstance(value, DTensor) else value
                    found.update(name.encode() + local.detach().numpy().tobytes())
    return found.hexdigest()


def with_rerun(settings: Table, directory: Path, load: str = "", **rerun: Any) -> Table:
    """Return settings with keys of ``[rerun]``, in a run directory, which resume what ``load`` names."""
    found = copy.deepcopy(settings)
    found["run"]["directory"] = str(directory)
    found["rerun"] = rerun
    if load:
        found["checkpoint"] = {"load": load}
    return found


def events(directory: Path) -> list[dict[str, Any]]:
    """Return the events that the machine has written."""
    path = directory / RERUN_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(pool: Pool, settings: Mapping[str, Any], *, changed: bool = False) -> list[Ended]:
    """Make an attempt on all ranks."""
    return pool.run(world_of(dict(settings)), attempt, settings, changed)
