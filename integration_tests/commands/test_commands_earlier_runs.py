"""Runs that an earlier version wrote: its folders in `assets/` are verified, resumed and generated from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import read_metrics, succeed

EARLIER = Path(__file__).parent / "assets" / "before_rooms"
"""Of four steps, in two processes, with a checkpoint after the last; and the metrics of six steps without a break."""


def test_commands_resume_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """With its own config: the next steps come to what they came to when that version never stopped."""
    run = tmp_path / "run"
    shutil.copytree(EARLIER / "run", run)
    succeed("train", run / "config.toml", f"run.directory={run}", "checkpoint.load=latest", "run.steps=6")
    (steps, _), (expected, _) = read_metrics(run), read_metrics(EARLIER / "six_steps")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in steps] == pytest.approx([line[key] for line in expected], rel=1e-5)


def test_commands_read_a_checkpoint_of_an_earlier_version() -> None:
    """It is verified, shown, and generated from."""
    checkpoint = EARLIER / "run" / "checkpoints" / "step_00000004"
    assert "178 tensors in 2 shards" in succeed("checkpoint", "verify", checkpoint)
    assert "language.layers.1.attention.query.weight" in succeed("checkpoint", "inspect", checkpoint)
    assert succeed("generate", checkpoint, "--text", "ab", "--max-tokens", "3").count("\n") == 1
