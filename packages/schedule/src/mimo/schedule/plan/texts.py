"""How errors name the parts of a plan, the same in the checker and the emulator."""

from __future__ import annotations

from collections.abc import Iterable

from mimo.schedule.plan.plan import Action
from mimo.topology import StageId


def stage_text(stage: StageId) -> str:
    """Return ``language.0``."""
    return f"{stage.module}.{stage.stage}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``rank 4``, or ``ranks 0-3,5``: ascending ranks with runs contracted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def microbatches_text(microbatches: Iterable[int]) -> str:
    """Return ``microbatch 3`` or ``microbatches 3, 4``."""
    text = ", ".join(map(str, microbatches))
    return f"microbatch {text}" if text.isdigit() else f"microbatches {text}"


def action_text(action: Action) -> str:
    """Return ``forward of language.0, microbatch 3`` or ``send on vision->language by vision.0, microbatch 3``."""
    stage = stage_text(action.stage_id)
    text = f"{action.kind} of {stage}" if action.edge is None else f"{action.kind} on {action.edge} by {stage}"
    return f"{text}, {microbatches_text(action.microbatches)}" if action.microbatches else text


def place_text(ranks: Iterable[int], index: int, action: Action) -> str:
    """Return the place of an action: its actor, its index in the actor's list (from 0) and what it is."""
    return f"plan, {ranks_text(ranks)}, action {index} ({action_text(action)})"
