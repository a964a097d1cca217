"""Ways to train the models of `_big_models` a step at a time: our trainer, `transformers`, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import attrs
import torch
from _big_models import make_job, size_of
from _case import Case
from _other_models import Plain, Transformers
from _padded import Batches
from torch import nn

from mimo.trainer import Job, Trainer

OURS, OURS_COMPILED, TRANSFORMERS, PLAIN = "ours", "ours, compiled", "transformers", "plain PyTorch"
Compiled: TypeAlias = Literal["none", "all", "ours-too"]
"""Which ways are compiled: none, each, or ours once more beside those that are not."""
_OPTIMIZER: Mapping[str, Any] = {"plugin": "distributed"}


@attrs.frozen
class Step:
    """What a step came to: its loss, and the rows of the decoder, without padding."""

    loss: float
    rows: int


class Way(Protocol):
    """A model with what trains it.

    Attributes:
        compiled: whether its layers are.
    """

    compiled: bool

    def step(self, number: int) -> Step:
        """Take a step."""

    def close(self) -> None:
        """End what runs beside."""


def knows_compile(case: Case) -> bool:
    """Return whether settings have ``run.compile``."""
    run = make_job(case, pictures=False, optimizer=_OPTIMIZER).settings.run
    return "compile" in attrs.fields_dict(type(run))


def job_of(case: Case, *, pictures: bool, compiled: bool = False, decoder: str = "decoder", **run: Any) -> Job:
    """Return our job; the CPU compiles as little of it as shows that it works."""
    if compiled:
        run = {"compile": True, **({"compile_backend": _backend(case)} if case.tiny else {}), **run}
    return make_job(case, pictures=pictures, decoder=decoder, optimizer=_OPTIMIZER, **run)


def _backend(case: Case) -> str:
    return "aot_eager" if case.tiny else "inductor"


class Ours:
    """Our trainer.

    Attributes:
        compiled: whether its layers are.
        operations: of the model in each step, of all modules.
        peak: operations a second that the device can do; None where nobody knows.
    """

    def __init__(self, case: Case, *, pictures: bool, compiled: bool, decoder: str) -> None:
        self.compiled = compiled
        self._trainer = Trainer(job_of(case, pictures=pictures, compiled=compiled, decoder=decoder), device=case.device)
        self.operations: dict[int, float] = {}
        self.peak: float | None = None

    def step(self, number: int) -> Step:
        """Take a step."""
        info = self._trainer.train(number)
        self.operations[number] = sum(flops.model_operations for flops in info.flops.values())
        self.peak = next((flops.model_flops / flops.mfu for flops in info.flops.values() if flops.mfu), None)
        return Step(info.loss, info.rows["language"])

    def close(self) -> None:
        """End the threads that read ahead."""
        self._trainer.close()


class Loop:
    """A usual loop: autocast to bf16, AdamW in one kernel, gradients clipped; weights are fp32, as ours."""

    def __init__(self, case: Case, model: Callable[[], nn.Module], *, pictures: bool, compiled: bool) -> None:
        self._case, self.compiled = case, compiled
        torch.manual_seed(0)
        with case.device:
            self._model = model()
        if compiled:
            for layer in _layers(self._model):
                layer.compile(dynamic=True, backend=_backend(case))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self._batches = Batches(job_of(case, pictures=pictures), pins=case.is_cuda)

    def step(self, number: int) -> Step:
        """Take a step."""
        batches = self._batches.take(number)
        count, loss = sum(batch.count for batch in batches), torch.zeros((), device=self._case.device)
        self._optimizer.zero_grad()
        for batch in batches:
            with torch.autocast(self._case.device.type, dtype=torch.bfloat16):
                share = self._model(batch.to(self._case.device)) * (batch.count / count)
            share.backward()
            loss += share.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return Step(float(loss), sum(batch.rows for batch in batches))

    def close(self) -> None:
        """End the threads that make batches."""
        self._batches.close()


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, which are compiled one by one, as ours are: one graph serves all of a kind."""
    return [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]


def ways(case: Case, *, pictures: bool, compiled: Compiled, decoder: str) -> dict[str, Callable[[], Way]]:
    """Return what makes each way, by name; ours is missing where it can't be compiled."""
    size, each = size_of(case), compiled == "all"

    def ours(*, compiled: bool) -> Callable[[], Way]:
        return lambda: Ours(case, pictures=pictures, compiled=compiled, decoder=decoder)

    def loop(model: type[Transformers | Plain]) -> Callable[[], Way]:
        return lambda: Loop(case, lambda: model(size, pictures=pictures), pictures=pictures, compiled=each)

    found: dict[str, Callable[[], Way]] = {}
    if not each or knows_compile(case):
        found[OURS] = ours(compiled=each)
    found |= {TRANSFORMERS: loop(Transformers), PLAIN: loop(Plain)}
    if compiled == "ours-too":
        found[OURS_COMPILED] = ours(compiled=True)
    return found
