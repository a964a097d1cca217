"""Persistent buffers that a third-party encoder changes: a checkpoint holds them, or says that it can't."""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import resume_and_save, resume_run
from tables import Table, table
from test_oracle import on

from mimo.testing import Pool, RanksError


def settings(directory: Path, plugin: str, lanes: int, load: str = "none") -> Table:
    """Return a run of six steps with so many lanes of the encoder."""
    found = table({"vision": on(0, lanes - 1, plugin=plugin), "language": on(0, 0)}, microbatches=2)
    found["run"] |= {"steps": 6, "directory": str(directory)}
    found["checkpoint"] = {"load": load}
    return found


@pytest.mark.parametrize("lanes", [1, 2])
def test_buffers_resume(lanes: int, tmp_path: Path, pool: Pool) -> None:
    """In the same layout and in another: three steps of two microbatches have called it six times."""
    pool.run(2, resume_and_save, settings(tmp_path, "counting-vit", 2), 1, 3)
    first, *_ = pool.run(lanes, resume_run, settings(tmp_path, "counting-vit", lanes, str(tmp_path)), 4, 6)
    straight, *_ = pool.run(lanes, resume_run, settings(tmp_path / "straight", "counting-vit", lanes), 1, 6)
    assert first.began["vision.seen"] == 6
    assert first.ended["vision.seen"] == 12
    assert first.losses == pytest.approx(straight.losses[3:], rel=1e-5)


def test_buffers_that_differ_over_lanes_are_refused(tmp_path: Path, pool: Pool) -> None:
    """Of two that have seen other pictures none is the right one."""
    with pytest.raises(RanksError) as refused:
        pool.run(2, resume_and_save, settings(tmp_path, "greedy-vit", 2), 1, 1)
    assert "buffers.vision.seen: expected the same on every rank that holds it, got " in str(refused.value)
