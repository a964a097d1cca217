"""Items copied to the device beside what it computes: the same bit by bit, and in training they change nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import torch
from _case import Case, Found, alone, run
from jobs import make_job
from tables import table
from test_oracle import on
from torch import Tensor

from mimo.launch import ProcessInfo
from mimo.trainer import Trainer
from mimo.trainer.runtime import Copier, Staging, StreamCopier

STEPS, ROUNDS, ITEMS, ELEMENTS, SIDE, PRODUCTS = 12, 20, 16, 1 << 20, 4096, 20
"""Steps of training; rounds of copies, of so many items of so many fp32 each; products of matrices beside each."""
TINY = (4, 3, 4, 1 << 10, 64, 2)
SAME = 1e-5


class HostCopier:
    """What stands in for a device's copies where there is none."""

    def begin_thread(self) -> None:
        """Nothing differs between threads here."""

    def pinned(self, count: int) -> Tensor:
        """Return memory of which nothing is pinned."""
        return torch.empty(count, dtype=torch.uint8)

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        """Copy at once."""
        return source.clone(), SimpleNamespace(synchronize=lambda: None)

    def receive(self, _sent: Tensor, _event: Any) -> None:
        """Wait for nothing."""


@attrs.define(eq=False)
class CountedCopier:
    """Counts what another one copies."""

    inner: Copier
    sent: list[int] = attrs.field(factory=list)

    def begin_thread(self) -> None:
        """Do as the other does."""
        self.inner.begin_thread()

    def pinned(self, count: int) -> Tensor:
        """Return what the other returns."""
        return self.inner.pinned(count)

    def send(self, source: Tensor) -> tuple[Tensor, torch.Event]:
        """Count the bytes."""
        self.sent.append(len(source))
        return self.inner.send(source)

    def receive(self, sent: Tensor, event: torch.Event) -> None:
        """Do as the other does."""
        self.inner.receive(sent, event)


def copier_of(case: Case) -> Copier:
    """Return what copies to the device of the test."""
    return StreamCopier(case.device, torch.Stream(case.device)) if case.is_cuda else HostCopier()


def test(case: Case) -> Found:
    """Compare bytes, then losses."""
    steps, rounds, items, elements, side, products = (
        TINY if case.tiny else (STEPS, ROUNDS, ITEMS, ELEMENTS, SIDE, PRODUCTS)
    )
    figures: dict[str, Any] = {"copies": "of the device" if case.is_cuda else "a stand-in within host memory"}
    with alone(case) as process:
        wrong_rounds = _copied(case, rounds, items, elements, side, products, figures)
        plain, _ = _trained(case, process, steps, None)
        copier = CountedCopier(copier_of(case))
        losses, seconds = _trained(case, process, steps, copier)
    difference = max(abs(one / other - 1) for one, other in zip(losses, plain, strict=True))
    figures |= {
        "losses apart": difference,
        "steps": steps,
        "steps sent whole": len(copier.sent),
        "seconds a step": seconds,
    }
    checks = {
        f"{wrong_rounds} of {rounds} rounds have other bits": not wrong_rounds,
        f"losses are apart by {difference:.3g}, allowed {SAME:g}": difference <= SAME,
        "no step was sent whole": bool(copier.sent),
    }
    return Found(figures=figures, wrong=[line for line, holds in checks.items() if not holds])


def _copied(
    case: Case, rounds: int, items: int, elements: int, side: int, products: int, figures: dict[str, Any]
) -> int:
    """Return in how many rounds what came is not what was sent, by a thread while this one has the device compute."""
    x = torch.randn(side, side, device=case.device)
    staging = Staging(copier_of(case), max_bytes=1 << 30)
    own = [[{"pixels": torch.rand(elements)} for _ in range(items)] for _ in range(2)]

    def compute() -> None:
        for _ in range(products):
            x @ x

    def copy(number: int) -> Any:
        return staging.send(own[number % 2])

    wrong, both = 0, list[float]()
    took = {"computing": _seconds(case, compute), "copying": _seconds(case, lambda: copy(0).take(0))}
    for number in range(rounds):
        found: list[Any] = []
        begun = time.perf_counter()
        thread = threading.Thread(target=lambda number=number, found=found: found.append(copy(number)))
        thread.start()
        compute()
        thread.join()
        sums = [found[0].take(item)["pixels"].double().sum() for item in range(items)]
        wanted = [item["pixels"].double().sum() for item in own[number % 2]]
        both.append(time.perf_counter() - begun)
        same = all(
            torch.equal(found[0].take(item)["pixels"].cpu(), own[number % 2][item]["pixels"]) for item in range(items)
        )
        wrong += not same or any(abs(float(s.cpu() / w) - 1) > 1e-12 for s, w in zip(sums, wanted, strict=True))
    figures["seconds of a round"] = {**took, "both": sorted(both)[len(both) // 2]}
    figures["bytes of a round"] = items * elements * 4
    return wrong


def _seconds(case: Case, work: Callable[[], Any]) -> float:
    """Return the seconds of the second of two runs of something."""
    for _ in range(2):
        begun = time.perf_counter()
        work()
        if case.is_cuda:
            torch.accelerator.synchronize()
    return time.perf_counter() - begun


def _trained(case: Case, process: ProcessInfo, steps: int, copier: Copier | None) -> tuple[list[float], float]:
    """Return losses, and the mean seconds of the steps after the first."""
    settings = table({"vision": on(0, 0), "language": on(0, 0)}, microbatches=2)
    settings["run"]["steps"] = steps
    settings["data"] |= {"workers": 2 if copier is not None else 0, "ahead": 2}
    staging = None if copier is None else Staging(copier, max_bytes=1 << 28)
    with patch.object(Staging, "to", return_value=staging):
        trainer = Trainer(make_job(settings), rank=0, device=case.device, objects=process.objects)
    found = [trainer.train(step) for step in range(1, steps + 1)]
    trainer.close()
    return [info.loss for info in found], sum(info.seconds for info in found[1:]) / (steps - 1)


if __name__ == "__main__":
    sys.exit(run(test))
