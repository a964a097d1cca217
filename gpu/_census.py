"""Where a step waits for the device: each host synchronisation by file and line, and how often a step comes there.

On a GPU PyTorch reports each itself (`torch.cuda.set_sync_debug_mode`). On the CPU nothing ever waits, so what is
counted there replaces it: calls of the functions that would, of tensors that on a GPU might lie there. Those that
are made in C++ are not among them, and copies of what lies on the host anyway are.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _case import Case, Found, alone, noting, run
from jobs import make_job
from tables import Table, table
from test_oracle import SOFTMAX, on
from test_oracle_mamba import CONFIG as HYBRID
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mimo.launch import ProcessInfo
from mimo.trainer import Trainer

STEPS, TINY_STEPS, BEFORE = 10, 2, 2
MICROBATCHES = 2
MOST = 3
"""How often a step may wait; it does once, where it reads what all ranks have summed."""
EXPERT_LAYERS: Mapping[str, int] = {"experts": 2, "hybrid": 1}
"""Of `models`: each waits once more in each microbatch, for how many rows go where."""
_NEEDLE = "called a synchronizing CUDA operation"
_WAITING = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero, torch.masked_select),
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    }
)
_OURS = ("/mimo/", "/mimo_")
UNKNOWN = "nowhere"


def place_of(frame: FrameType | None, *, own: str) -> str:
    """Return file and line of ours nearest to a frame, `UNKNOWN` where none of ours is.

    Args:
        frame: the innermost one.
        own: the file of this test, whose own call is to be found too.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path == own and frame.f_code.co_name == wait_here.__name__:
            return f"{Path(path).name}:{frame.f_lineno}"
        found = max((path.rfind(mark) for mark in _OURS), default=-1)
        if found >= 0 and path != own:
            return f"{path[found + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return UNKNOWN


def wait_here(x: Tensor) -> float:
    """Wait for the device, where the census must find it."""
    return float(x.sum().item())


class _Counting(TorchFunctionMode):
    """Counts calls that would wait, if their tensors lay on a GPU."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the call, and make it."""
        if func in _WAITING:
            self._count()
        return func(*args, **(kwargs or {}))


@contextmanager
def census(case: Case) -> Iterator[Counter[str]]:
    """Give a counter of places that fills while the block runs."""
    counter: Counter[str] = Counter()

    def count() -> None:
        counter[place_of(sys._getframe(1), own=__file__)] += 1  # noqa: SLF001  # there is no public way

    if not case.is_cuda:
        with _Counting(count):
            yield counter
        return

    def show(message: Warning | str, *_about: object) -> None:
        if _NEEDLE in str(message):
            count()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]  # it looks at nothing but the message
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counter
        finally:
            torch.cuda.set_sync_debug_mode("default")


def models(*, tiny: bool) -> Mapping[str, Table]:
    """Return the settings of what is looked at."""
    here = on(0, 0)
    pictures = {"vision": here, "language": here}
    found = {"vit and decoder": table(pictures, microbatches=MICROBATCHES)}
    if not tiny:
        experts = {**here, "plugin": "hybrid", "config": HYBRID}
        found |= {
            "experts": table(pictures, microbatches=MICROBATCHES, language=SOFTMAX, seed=11),
            "hybrid": table({"vision": here, "language": experts}, microbatches=MICROBATCHES),
            "in bf16": table(pictures, microbatches=MICROBATCHES),
            "compiled": table(pictures, microbatches=MICROBATCHES),
        }
        found["in bf16"]["run"] |= {"precision": "bf16"}
        found["in bf16"]["optimizer"] |= {"plugin": "distributed"}
        found["compiled"]["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    return found


def test(case: Case) -> Found:
    """Count in steps that are like all later ones."""
    figures: dict[str, Any] = {
        "counted": "by PyTorch" if case.is_cuda else "a stand-in: calls that would wait on a GPU"
    }
    wrong: list[str] = []
    steps = TINY_STEPS if case.tiny else STEPS
    with noting("the group of one rank", wrong), alone(case) as process:
        with census(case) as planted:
            wait_here(torch.ones(3, device=case.device))
        mine = f"{Path(__file__).name}:{wait_here.__code__.co_firstlineno + 2}"
        if planted != {mine: 1}:
            wrong.append(f"expected the one synchronisation of {mine}, got {dict(planted)}")
        for name, settings in models(tiny=case.tiny).items():
            counter: Counter[str] | None = None
            with noting(name, wrong):
                counter = _count(case, settings, steps, process)
            if counter is None:
                continue
            a_step = {place: count / steps for place, count in counter.most_common()}
            figures[name] = {"a step": sum(a_step.values()), "places": a_step}
            wrong += missed_by(case, name, counter, steps)
    return Found(figures=figures, wrong=wrong)


def missed_by(case: Case, name: str, counter: Counter[str], steps: int) -> list[str]:
    """Return which bounds what was counted misses.

    Args:
        case: where; the stand-in of a CPU counts reads of what lies on the host anyway, and how often is not looked at.
        name: one of `models`.
        counter: of places.
        steps: in which.
    """
    wrong, most = [], MOST + EXPERT_LAYERS.get(name, 0) * MICROBATCHES
    if UNKNOWN in counter:
        wrong.append(f"{name}: {counter[UNKNOWN]} synchronisations have no file of ours")
    if not counter:
        wrong.append(f"{name}: none was found, though what ranks agree on has to be read")
    if case.is_cuda and counter.total() > most * steps:
        wrong.append(f"{name}: {counter.total() / steps:g} synchronisations a step, more than {most}")
    return wrong


def _count(case: Case, settings: Table, steps: int, process: ProcessInfo) -> Counter[str]:
    settings["run"]["steps"] = BEFORE + steps
    trainer = Trainer(make_job(settings), rank=0, device=case.device, objects=process.objects)
    for step in range(1, BEFORE + 1):
        trainer.train(step)
    with census(case) as counter:
        for step in range(BEFORE + 1, BEFORE + steps + 1):
            trainer.train(step)
    return counter


if __name__ == "__main__":
    sys.exit(run(test))
