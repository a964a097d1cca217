"""The most that ranks hold while they train, measured storage by storage, beside what `mimo check` estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from jobs import CPU, make_job
from tables import Table, table, world_of
from test_oracle import SOFTMAX, SP, Modules, on

from mimo.hooks import MemoryBytes
from mimo.testing import Pool
from mimo.trainer import Trainer

MOST = 0.1
"""By what share an estimate may differ from what is measured."""
DECODER = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 300}
EXACT = ("weights", "optimizer")
FULL = {"plugin": "distributed", "shard": "full"}
LAYOUTS: Mapping[str, tuple[Modules, Mapping[str, Any], Mapping[str, Any]]] = {
    "tensor ranks": ({"vision": on(0, 1, tp=2), "language": on(0, 1, tp=2, **SP)}, {}, {}),
    "pipelines": ({"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)}, {}, {}),
    "shards": ({"vision": on(0, 1), "language": on(0, 1)}, FULL, {}),
    "recomputing": ({"vision": on(0, 0, recompute="full"), "language": on(0, 0, recompute="full")}, {}, {}),
    "context ranks": ({"vision": on(0, 0), "language": on(0, 1, cp=2)}, {}, {}),
    "all logits": ({"vision": on(0, 0), "language": on(0, 0)}, {}, {"vocabulary": 3000}),
    "few rows of logits": ({"vision": on(0, 0), "language": on(0, 0, loss_rows=16)}, {}, {"vocabulary": 3000}),
    "experts": ({"vision": on(0, 0), "language": on(0, 1, ep=2)}, {}, SOFTMAX),
}
"""Modules, keys of the optimizer, and keys of the decoder."""


def settings_of(layout: str) -> Table:
    """Return settings whose samples are about equally long, and whose activations are most of what is held."""
    modules, optimizer, decoder = LAYOUTS[layout]
    settings = table(modules, microbatches=3, pictures="digits", language={**DECODER, **decoder})
    settings["modules"]["vision"]["config"] |= {"width": 48, "intermediate": 96}
    settings["run"] |= {"device": "cpu", "steps": 1}
    settings["logging"] = {"memory": True}
    settings["data"] |= {"words": [28, 36], "side": 16}
    settings["optimizer"] |= optimizer
    return settings


def measure(rank: int, settings: Table) -> Mapping[str, MemoryBytes]:
    """Return what the metrics of the only step say of memory."""
    return Trainer(make_job(settings), rank=rank, device=CPU).train(1).memory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimates_are_what_ranks_hold(layout: str, pool: Pool) -> None:
    """All of it within a tenth, most of it activations; weights and the optimizer's state to the byte."""
    settings = settings_of(layout)
    first, *others = pool.run(world_of(settings), measure, settings)
    assert all(other == first for other in others)
    for module, memory in first.items():
        assert {kind: memory.held[kind] for kind in EXACT} == {kind: memory.estimated[kind] for kind in EXACT}
        assert memory.rank_held == pytest.approx(memory.rank_estimated, rel=MOST), (module, memory)
    activations = sum(memory.estimated["activations"] for memory in first.values())
    assert activations > 4 * MOST * max(memory.rank_held or 0 for memory in first.values())
