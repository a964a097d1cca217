"""A checkpoint of a decoder of a billion parameters with its optimizer's state, written while training continues."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _big_models import make_job
from _case import Case, Found, run
from _turns_taken import synchronise
from torch import Tensor

from mimo.checkpoint import Saver, latest, load, verify
from mimo.model.runtime import local
from mimo.trainer import Trainer

STEPS, TINY_STEPS = 5, 2
"""Between saves, and without one."""
STALL, FIRST_STALL, SIZE = 1.0, 10.0, 12e9
"""Seconds for which a save may stall training, and the first one, which takes page-locked memory for all of it; and how
many bytes one has at least."""
ABOUT: Mapping[str, Any] = {"config": {}, "topology": {}}


def tensors_of(tree: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of each tensor of a state, with its path."""
    if isinstance(tree, Tensor):
        yield name, local(tree.detach())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))


class Training:
    """Steps of a trainer, one after the other, and how long each took."""

    def __init__(self, case: Case) -> None:
        self.case, self._step = case, 0
        job = make_job(case, pictures=False, optimizer={"plugin": "distributed"})
        self.trainer = Trainer(job, device=case.device)

    def steps(self, count: int) -> float:
        """Train some steps; return the median of their seconds."""
        found = []
        for _ in range(count):
            self._step += 1
            begun = time.perf_counter()
            self.trainer.train(self._step)
            synchronise(self.case)
            found.append(time.perf_counter() - begun)
        return statistics.median(found)

    def save(self, saver: Saver) -> float:
        """Save; return the seconds after which training continues."""
        synchronise(self.case)
        begun = time.perf_counter()
        saver.save(self._step, self.trainer.state(), **ABOUT)
        return time.perf_counter() - begun


def test(case: Case) -> Found:
    """Save twice, train meanwhile, and read what was written last."""
    folder, count = case.folder / "checkpoints", TINY_STEPS if case.tiny else STEPS
    training = Training(case)
    training.steps(2)
    without = training.steps(count)
    saver = Saver(folder, asynchronous=True, keep=1)
    first = training.save(saver)
    training.steps(1)
    saver.wait()
    saved = {name: value.to("cpu", copy=True) for name, value in tensors_of(training.trainer.state())}
    again = training.save(saver)
    beside = training.steps(count)
    begun = time.perf_counter()
    saver.wait()
    waited = time.perf_counter() - begun
    failure = saver.take_failure()
    saver.close()
    if failure is not None:
        return Found(figures={}, wrong=[f"the checkpoint was not written: {failure}"])
    wrong = _read_back(folder, training, saved)
    weights = sum(value.nbytes for _, value in tensors_of(training.trainer.model_state()))
    training.trainer.close()
    size = sum(value.nbytes for value in saved.values())
    figures = {
        "bytes": size,
        "tensors": len(saved),
        "stall of the first save, which takes host memory, seconds": first,
        "stall of a save, seconds": again,
        "seconds a step": {"nothing written": without, "while it is written": beside},
        f"seconds until it was written, after {count} steps": waited,
    }
    wrong += bounds_missed(case, size=size, weights=weights, first=first, again=again)
    if not case.is_cuda:
        figures["left out"] = "the stall is not judged: nothing is copied from a device"
    return Found(figures=figures, wrong=wrong)


def bounds_missed(case: Case, *, size: int, weights: int, first: float, again: float) -> list[str]:
    """Return the bounds that were missed: of bytes, and on a GPU of seconds for which two saves stall training."""
    wrong = []
    least = max(3 * weights, 0 if case.tiny else SIZE)
    if size < least:
        wrong.append(f"{size} bytes are saved, at least {least:.0f} expected: weights and two moments of each")
    if case.is_cuda:
        stalls = {"the first save": (first, FIRST_STALL), "a save": (again, STALL)}
        wrong += [
            f"{name} stalls training for {took:.3g} s, allowed {most:g}"
            for name, (took, most) in stalls.items()
            if not took < most
        ]
    return wrong


def _read_back(folder: Path, training: Training, saved: Mapping[str, Tensor]) -> list[str]:
    """Fill the state, which has changed since, from the newest checkpoint; return what differs from what was saved."""
    step = latest(folder)
    if step is None:
        return ["there is no checkpoint"]
    verify(step)
    state = training.trainer.state()
    changed = sum(not same_bits(value, saved[name]) for name, value in tensors_of(state))
    load(step, state)
    differing = [name for name, value in tensors_of(state) if not same_bits(value, saved[name])]
    wrong = [f"{len(differing)} tensors have other bits, as {differing[0]}"] if differing else []
    return wrong if changed else [*wrong, "nothing has changed since the save, so that reading shows nothing"]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(x.cpu().contiguous().view(-1).view(torch.uint8) for x in (one, other)))


if __name__ == "__main__":
    sys.exit(run(test))
