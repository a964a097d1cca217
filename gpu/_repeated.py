"""Two runs of the same settings with ``run.deterministic``: the same losses and weights to the bit."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from _case import Case, Found, noting, run
from _checkpoint import same_bits, tensors_of
from _ways import job_of
from torch import Tensor

from mimo.trainer import Trainer

STEPS, TINY_STEPS = 4, 2


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """The losses of a run, its norms, and its state, in host memory."""

    losses: Sequence[float]
    norms: Sequence[float]
    state: Mapping[str, Tensor]


def train(case: Case, *, pictures: bool, deterministic: bool) -> Outcome:
    """Train some steps, from the beginning."""
    gc.collect()
    job = job_of(case, pictures=pictures, deterministic=deterministic)
    trainer = Trainer(job, device=case.device)
    infos = [trainer.train(step) for step in range(1, (TINY_STEPS if case.tiny else STEPS) + 1)]
    state = {name: value.to("cpu", copy=True) for name, value in tensors_of(trainer.state())}
    trainer.close()
    return Outcome(losses=[info.loss for info in infos], norms=[info.grad_norm for info in infos], state=state)


def differing(one: Outcome, other: Outcome) -> list[str]:
    """Return what has other bits."""
    found = [name for name, value in one.state.items() if not same_bits(value, other.state[name])]
    lists = {"losses": (one.losses, other.losses), "norms": (one.norms, other.norms)}
    return [*(name for name, (first, second) in lists.items() if first != second), *found]


def test(case: Case) -> Found:
    """Train each model twice."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for name, pictures in (("text", False), ("pictures", True)):
        with noting(name, wrong):
            one, other = (train(case, pictures=pictures, deterministic=True) for _ in range(2))
            found = differing(one, other)
            figures[name] = {"tensors": len(one.state), "with other bits": len(found), "losses": list(one.losses)}
            if found:
                wrong.append(f"{name}: {len(found)} of losses, norms and tensors have other bits, as {found[0]}")
            if len(set(one.losses)) == 1:
                wrong.append(f"{name}: all losses are {one.losses[0]}, so that nothing was trained")
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
