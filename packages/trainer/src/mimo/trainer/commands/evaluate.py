"""``mimo evaluate``: evaluate a checkpoint on held-out samples."""

from __future__ import annotations

from pathlib import Path


def evaluate(checkpoint: Path, /, *overrides: str) -> int:
    """Evaluate a checkpoint on the held-out samples, in one process unless ranks are overridden.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
    """
    from mimo.trainer.run.start import start_evaluation

    return start_evaluation(checkpoint, overrides)
