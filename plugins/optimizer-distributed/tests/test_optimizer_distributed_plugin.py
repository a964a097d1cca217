"""The plugin's settings, and what it declares about them without torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from mimo.hooks import ConfigError
from mimo_optimizer_distributed import DISTRIBUTED, DistributedConfig


def test_distributed_is_found_by_its_entry_point() -> None:
    """Its name is what users write."""
    (point,) = entry_points(group="mimo.optimizers", name="distributed")
    assert point.load().mimo_register_optimizers() == [DISTRIBUTED]


def test_distributed_registers_without_torch() -> None:
    """So that planning starts quickly."""
    code = "import sys, mimo_optimizer_distributed.sharding; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  # our own code


@pytest.mark.parametrize(
    ("keys", "waits", "lanes"),
    [
        ({}, False, 0),
        ({"shard": "gradients"}, True, 0),
        ({"shard": "full", "shard_lanes": 4}, True, 4),
        ({"shard_lanes": 1}, False, 1),
    ],
)
def test_distributed_declares_where_lanes_wait_for_each_other(keys: dict[str, object], waits: bool, lanes: int) -> None:
    """Plans are proved with that in mind; a copy on each lane needs nobody."""
    config = DistributedConfig(**keys)  # type: ignore[arg-type]
    assert DISTRIBUTED.rendezvous(config) is waits
    assert DISTRIBUTED.shard_lanes(config) == lanes


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"shard_lanes": -1},
            (
                "optimizer.shard_lanes: expected 1 or more data lanes, or 0 for all of a module's, got -1. "
                "Leave it out for all."
            ),
        ),
        (
            {"shard": "full", "shard_lanes": 1},
            (
                "optimizer.shard_lanes: expected 2 or more data lanes, or 0 for all of a module's, as shard is 'full', "
                "got 1, by which each lane holds a whole copy. Set shard = 'optimizer' for copies, or shard_lanes = 0."
            ),
        ),
        ({"eps": -1.0}, "optimizer.eps: expected a finite number above 0, got -1.0."),
    ],
)
def test_distributed_refuses_settings_by_their_path(keys: dict[str, object], text: str) -> None:
    """AdamW's are refused as AdamW does."""
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**keys)  # type: ignore[arg-type]
    assert str(error.value) == text
