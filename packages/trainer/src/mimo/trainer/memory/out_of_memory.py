"""The end of a run whose device has no memory left: where that was, what was estimated, and what would have fitted."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import attrs
import torch

from mimo.hooks import RunError, UserError
from mimo.launch import ProcessInfo
from mimo.trainer.config.names import memory_file
from mimo.trainer.config.settings import Settings
from mimo.trainer.cost.memory import RankMemory, estimate_memory
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve

_SHARE = 0.9
"""Of what was too much, what a change may be estimated to take: as much as estimates may be off."""
_SHOWN = 3
_LEVELS = ("none", "selective", "full")
_SECONDS = 20.0
"""For which other settings are tried, while the other ranks wait."""

Change: TypeAlias = tuple[str, Settings]
"""Words for some settings, as on a command line, and the whole file with them."""


@contextlib.contextmanager
def memory_explained(
    job: Job, process: ProcessInfo, resolve_again: Callable[[Settings], Job] = resolve
) -> Iterator[None]:
    """Raise, in place of an error of a device that has no memory left, one that says what would have fitted.

    What the allocator holds is written to the run directory, where the device says it.

    Args:
        job: that this process is a rank of.
        process: which.
        resolve_again: makes a job of other settings.

    Raises:
        RunError: the device has no memory left within the block.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        estimate = estimate_memory(job).get(process.rank, RankMemory())
        status = process.heartbeat
        doing = [status.doing, "" if status.activity is None else status.activity.describe()]
        names = [module.name for module in job.modules if process.rank in module.grid]
        limit = round(_SHARE * min(estimate.device, _capacity(process.device) or estimate.device))
        raise RunError(
            f"modules.{names[0]}" if len(names) == 1 else "modules",
            expected=f"what rank {process.rank} holds of {', '.join(names) or 'no module'} to fit {process.device} in "
            f"{', '.join(filter(None, doing)) or 'its work'}; estimated are {_described(estimate)}",
            got=str(error).partition("\n")[0],
            fix=" ".join([_advice(job, process.rank, limit, resolve_again), *_written(job.directory, process)]),
        ) from error


def fitting(
    job: Job, rank: int, limit: int, resolve_again: Callable[[Settings], Job] = resolve
) -> Iterator[tuple[str, RankMemory]]:
    """Yield changes of settings by which a rank is estimated to hold no more, the least ones first.

    Args:
        job: that holds too much.
        rank: which.
        limit: bytes of the device.
        resolve_again: makes a job of other settings.
    """
    until = time.monotonic() + _SECONDS
    for words, settings in _changes(job, rank):
        if time.monotonic() > until:
            return
        with contextlib.suppress(UserError):  # settings that don't go together, or can't be read any more
            estimate = estimate_memory(resolve_again(settings)).get(rank, RankMemory())
            if estimate.device <= limit:
                yield words, estimate


def _changes(job: Job, rank: int) -> Iterator[Change]:
    """Yield changes of settings that leave each rank's part of the model as it is: the least costly ones first."""
    again = [_recomputing(job, rank, how) for how in ("selective", "full")]
    yield from (change for change in again if change is not None)
    smaller = list(_smaller(job.settings))
    yield from smaller
    if (full := again[-1]) is not None:
        yield from ((f"{full[0]} {words}", attrs.evolve(full[1], run=less.run)) for words, less in smaller)


def _recomputing(job: Job, rank: int, how: Literal["selective", "full"]) -> Change | None:
    """Return settings in which modules of a rank recompute more, those that can and don't yet; None for none."""
    changed = {
        module.name: attrs.evolve(job.settings.modules[module.name], recompute=how)
        for module in job.modules
        if rank in module.grid and any(module.trains) and how in module.spec.recompute
        if _LEVELS.index(module.recompute) < _LEVELS.index(how)
    }
    if not changed:
        return None
    words = " ".join(f"modules.{name}.recompute={how}" for name in changed)
    return words, attrs.evolve(job.settings, modules={**job.settings.modules, **changed})


def _smaller(settings: Settings) -> Iterator[Change]:
    """Yield settings with half as many samples a microbatch, and half as many again."""
    run = settings.run
    size = run.micro_batch if run.global_batch else run.micro_tokens
    while (size := size // 2) >= 1:
        if run.global_batch:
            yield f"run.micro_batch={size}", attrs.evolve(settings, run=attrs.evolve(run, micro_batch=size))
        else:
            yield f"run.micro_tokens={size}", attrs.evolve(settings, run=attrs.evolve(run, micro_tokens=size))


def _advice(job: Job, rank: int, limit: int, resolve_again: Callable[[Settings], Job]) -> str:
    found = [
        f"{words} ({_mebibytes(estimate.device)})"
        for words, estimate in islice(fitting(job, rank, limit, resolve_again), _SHOWN)
    ]
    if found:
        return f"Estimated to fit: {'; or '.join(found)}."
    return (
        "No smaller microbatch and no recomputing is estimated to fit: cut the model over more ranks (tp, pp), or "
        'spread weights and optimizer over data lanes (optimizer.plugin=distributed, optimizer.shard="full").'
    )


def _described(estimate: RankMemory) -> str:
    """Return an estimate in words, kind by kind."""
    kinds = {
        "weights": estimate.weights,
        "gathered": estimate.gathered,
        "gradients": estimate.gradients,
        "optimizer": estimate.state,
        "activations": estimate.activations,
        "made ahead": estimate.ahead,
    }
    parts = ", ".join(f"{kind} {_mebibytes(count)}" for kind, count in kinds.items() if count)
    return f"{_mebibytes(estimate.device)} ({parts})"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _capacity(device: str) -> int | None:
    """Return the bytes of a device's memory, where it says."""
    if not device.startswith("cuda"):
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _written(directory: Path, process: ProcessInfo) -> Iterator[str]:
    """Write what a device's allocator holds, and yield a sentence that says where it is; nothing of other devices."""
    if not process.device.startswith("cuda"):
        return
    path = directory / memory_file(process.rank)
    with contextlib.suppress(OSError, RuntimeError):  # a full disk, or a device that answers no more
        path.write_text(json.dumps(torch.cuda.memory_snapshot()), encoding="utf-8")
        yield f"What its allocator holds is in {path}."
