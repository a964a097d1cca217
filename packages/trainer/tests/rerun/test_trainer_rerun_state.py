"""What a checkpoint says of the rerun machine may be anything: it is taken back only if it is what a run saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from mimo.checkpoint import Manifest
from mimo.hooks import CheckpointError
from mimo.trainer.rerun.state import check_devices, check_state, record_bytes

WAITING: Mapping[str, Any] = {
    "step": 3,
    "layout": "0123",
    "reason": "a loss that is not finite",
    "tolerance": 0.0,
    "ranks": [1],
    "deed": {"kind": "forward", "module": "vision", "stage": 0, "microbatches": [1]},
    "devices": [["a"], ["b", "c"]],
    "values": {"loss": "nan"},
}
STATE: Mapping[str, Any] = {"losses": [1.0, 2], "norms": [math.inf], "measured": 0.25, "waiting": WAITING}


def test_what_a_run_saves_is_taken_back() -> None:
    """With a step that waits and without, and with keys that later versions may add."""
    for state in (STATE, {**STATE, "waiting": None}, {**STATE, "more": 1}):
        check_state(state, Path("step"))


@pytest.mark.parametrize(
    ("forged", "key"),
    [
        (None, ""),
        ([], ""),
        ({}, ""),
        ({**STATE, "losses": 3}, ".losses"),
        ({**STATE, "losses": ["1"]}, ".losses"),
        ({**STATE, "losses": [10**400]}, ".losses"),
        ({**STATE, "norms": {"a": 1}}, ".norms"),
        ({**STATE, "norms": [True]}, ".norms"),
        ({**STATE, "measured": "x"}, ".measured"),
        ({**STATE, "measured": -1.0}, ".measured"),
        ({**STATE, "measured": math.nan}, ".measured"),
        ({**STATE, "waiting": 7}, ".waiting"),
        ({**STATE, "waiting": {}}, ".waiting"),
        ({**STATE, "waiting": {**WAITING, "more": 1}}, ".waiting"),
        ({**STATE, "waiting": {**WAITING, "ranks": 1}}, ".waiting"),
        ({**STATE, "waiting": {**WAITING, "deed": {"kind": "forward"}}}, ".waiting"),
        ({**STATE, "waiting": {**WAITING, "deed": [1]}}, ".waiting"),
        ({**STATE, "waiting": {**WAITING, "step": "3"}}, ".waiting.step"),
        ({**STATE, "waiting": {**WAITING, "ranks": [2]}}, ".waiting.ranks"),
        ({**STATE, "waiting": {**WAITING, "ranks": ["a"]}}, ".waiting.ranks"),
        ({**STATE, "waiting": {**WAITING, "devices": [[], ["b"]]}}, ".waiting.devices"),
        ({**STATE, "waiting": {**WAITING, "tolerance": None}}, ".waiting.tolerance"),
        ({**STATE, "waiting": {**WAITING, "values": {"loss": []}}}, ".waiting.values"),
        ({**STATE, "waiting": {**WAITING, "reason": 1}}, ".waiting.reason"),
    ],
)
def test_forged_state_is_refused_by_folder_and_key(forged: Any, key: str) -> None:
    """Anything else ends the load with a message, and not the run in the middle of a step."""
    with pytest.raises(CheckpointError) as refused:
        check_state(forged, Path("runs/a/step"))
    assert refused.value.where == f"runs/a/step: rerun.state{key}"


@pytest.mark.parametrize("world", [1, 4])
def test_a_step_that_is_run_again_has_a_device_for_each_rank(world: int) -> None:
    """Which matters only if it is run again."""
    check_devices(WAITING, Path("runs/a/step"), world=2)
    with pytest.raises(CheckpointError, match=rf"devices: expected those of {world} ranks, got") as refused:
        check_devices(WAITING, Path("runs/a/step"), world=world)
    assert refused.value.where == "runs/a/step: rerun.state.waiting.devices"


@attrs.frozen
class Entry:
    shape: tuple[int, ...]


@attrs.frozen
class Held:
    tensors: Mapping[str, Entry]


def test_a_shard_that_is_a_link_to_itself_is_not_followed(tmp_path: Path) -> None:
    """Sizes are those of files in the folder; the reader refuses shards behind a link."""
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "real.safetensors").write_bytes(b"x" * 1000)
    manifest: Any = Held({"rerun.rank_00000": Entry((900,)), "rerun.rank_00001": Entry((2**40,))})
    typed: Manifest = manifest
    assert record_bytes(typed, "rerun.rank_00000", tmp_path) == 900
    assert record_bytes(typed, "rerun.rank_00002", tmp_path) is None
    with pytest.raises(CheckpointError, match=r"rerun.rank_00001: expected as many bytes as its files hold"):
        record_bytes(typed, "rerun.rank_00001", tmp_path)
