"""Saving a run: what a checkpoint holds of it, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mimo.checkpoint import save
from mimo.hooks import Stateful
from mimo.topology import AXES, Grid
from mimo.trainer._engine import Engine
from mimo.trainer._preflight import CHECKPOINTS
from mimo.trainer._run_state import other_state


def save_step(engine: Engine, parts: Iterable[Stateful], step: int) -> Path:
    """Save model, optimizer, progress and the plugins' state after ``step``."""
    job = engine.job
    tree = {**engine.state(), **other_state(engine, parts, step)}
    return save(
        job.directory / CHECKPOINTS,
        step,
        tree,
        config=job.plain,
        topology={module.name: _grid(module.grid) for module in job.modules},
        keep=job.settings.checkpoint.keep or None,
    )


def _grid(grid: Grid) -> dict[str, Any]:
    return {"ranks": list(grid.ranks), **dict(zip(AXES, grid.shape, strict=True))}
