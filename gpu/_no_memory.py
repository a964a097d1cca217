"""How a run ends whose device has no memory left: what its last words say, and the snapshot of its allocator."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _big_models import make_job
from _case import Case, Found, alone, run
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mimo.hooks import RunError
from mimo.model.runtime import Attention
from mimo.trainer.runtime import RankMemory, estimate_memory, train_rank

WORDS = (
    "modules.language: ",
    "what rank 0 holds of language to fit ",
    " in step 1, ",
    "(weights ",
    "stimated to fit",  # "Estimated to fit: …", or that nothing smaller "is estimated to fit: …"
)
"""That the message has: where it was, what was estimated, kind by kind, and what would have fitted."""


def limit_of(estimate: RankMemory) -> int:
    """Return bytes into which the model fits, and what its forwards save does not."""
    return estimate.device - estimate.activations // 2


@contextmanager
def little_memory(case: Case, limit: int) -> Iterator[None]:
    """Leave so many bytes of the device to what runs within; on the CPU attention finds none."""
    if case.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            limit / torch.cuda.get_device_properties(case.device).total_memory, case.device
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, case.device)
        return

    def refuse(module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, Attention):
            return
        raise torch.OutOfMemoryError("there is no memory left")

    with register_module_forward_pre_hook(refuse):
        yield


def test(case: Case) -> Found:
    """Train where there is too little."""
    folder = case.folder / "run"
    job = make_job(
        case,
        pictures=False,
        optimizer={"plugin": "distributed"},
        steps=1,
        logging={"console": False},
        directory=str(folder),
    )
    estimate = estimate_memory(job)[0]
    limit = limit_of(estimate)
    message = ""
    with alone(case) as process, little_memory(case, limit):
        try:
            train_rank(job, process)
        except RunError as error:
            message = str(error)
    figures = {"message": message, "bytes left to it": limit, "estimated bytes": estimate.device}
    path = folder / "memory_rank0.json"
    held = held_bytes(path)
    if held is None and not case.is_cuda:
        figures["left out"] = "what the allocator holds: only a GPU's says it"
    else:
        figures["bytes in the snapshot"] = held
    return Found(figures=figures, wrong=missed(case, message, held, estimate, path))


def held_bytes(path: Path) -> int | None:
    """Return the bytes of all segments in a snapshot; None where there is none."""
    if not path.is_file():
        return None
    return sum(int(segment["total_size"]) for segment in json.loads(path.read_text(encoding="utf-8")))


def missed(case: Case, message: str, held: int | None, estimate: RankMemory, path: Path) -> list[str]:
    """Return what the message lacks, and what is wrong with the snapshot."""
    if not message:
        return ["the run did not end for lack of memory"]
    wrong = [
        f"the message lacks {words!r}: {message}"
        for words in (*WORDS, f"to fit {case.device} ")
        if words not in message
    ]
    if not case.is_cuda:
        return wrong
    if held is None or str(path) not in message:
        return [*wrong, f"no snapshot is in {path}, or the message does not name it"]
    if not estimate.weights <= held <= limit_of(estimate):
        wrong.append(f"the snapshot has {held} bytes, weights {estimate.weights}, and {limit_of(estimate)} were left")
    return wrong


if __name__ == "__main__":
    sys.exit(run(test))
