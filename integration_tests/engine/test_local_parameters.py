"""Layers compute with plain local tensors: in a forward and a backward no operation is one of DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from jobs import CPU, make_job
from tables import Table, table, world_of
from test_oracle import SOFTMAX, SP, on
from test_oracle_mamba import CONFIG as HYBRID
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimo.testing import Pool
from mimo.trainer import Trainer

CASES: Mapping[str, Mapping[str, Any]] = {
    "experts, tp2": {
        "modules": {"vision": on(0, 1, tp=2, **SP), "language": on(0, 1, tp=2, **SP, recompute="full")},
        "language": SOFTMAX,
    },
    "hybrid, lanes": {"modules": {"vision": on(0, 1), "language": {**on(0, 1), "plugin": "hybrid", "config": HYBRID}}},
}


class _OfDTensors(TorchDispatchMode):
    """Counts operations of DTensors, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and compute."""
        self.count[str(func)] += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def operations_of_a_step(rank: int, settings: Table) -> tuple[Counter[str], Counter[str]]:
    """Return how many operations read DTensors in forwards and backwards of a step, by name, and in a planted use."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    with _OfDTensors() as mode:
        trainer.accumulate(1)
    with _OfDTensors() as planted:
        weights: Any = trainer.model_state()["vision"]
        torch.mul(weights["layers.0.attention_norm.weight"], 2.0)
    return mode.count, planted.count


@pytest.mark.each("case")
@pytest.mark.parametrize("case", CASES)
def test_no_layer_pays_for_the_dtensor_of_its_parameters(case: str, pool: Pool) -> None:
    """Of encoder and language model, in no microbatch; a use of one is found."""
    settings = table(**CASES[case], microbatches=2)
    for found, planted in pool.run(world_of(settings), operations_of_a_step, settings):
        assert found.total() == 0, +found
        assert len(found) > 20
        assert planted["aten.mul.Tensor"] == 1
