"""Compiled layers of encoders: ragged microbatches share a few graphs, which nothing ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from jobs import CPU, make_job
from tables import SAMPLES, Table, table
from test_oracle import on
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_radio import CONFIGS as RADIO
from test_oracle_vision import FAMILIES as VISION

from mimo.testing import Pool
from mimo.trainer import Trainer

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "vit": {},
    "siglip": VISION["siglip, native"],
    "clip": VISION["clip, tiles"],
    "radio": {"plugin": "radio", "config": RADIO["patches joined"]},
    "whisper": {"plugin": "whisper", "config": WHISPER["silence heard"]},
}
ALWAYS = "whisper"


def graphs_of_a_step(rank: int, settings: Table) -> tuple[int, int]:
    """Return how many graphs a step of ragged microbatches takes, and how many places end one."""
    from torch._dynamo.utils import counters

    Trainer(make_job(settings), rank=rank, device=CPU).train(1)
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.each("encoder")
@pytest.mark.parametrize(
    "encoder", [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.soak) for name in ENCODERS]
)
def test_layers_of_encoders_share_three_graphs_at_most(encoder: str, pool: Pool) -> None:
    """Over 24 microbatches of a sample each, beside the one graph of a dense language model."""
    name = "audio" if encoder == "whisper" else "vision"
    settings = table({name: {**on(0, 0), **ENCODERS[encoder]}, "language": on(0, 0)}, microbatches=SAMPLES)
    settings["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    ((graphs, breaks),) = pool.run(1, graphs_of_a_step, settings)
    assert 2 <= graphs <= 1 + 3
    assert breaks == 0
