"""What a rank does of a plan, as its heartbeat tells it: the executor reports actions, the watchdog reads text."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mimo.launch import Heartbeat
from mimo.schedule import Action
from mimo.topology import StageId, show_ranks

_WORDS = {"input-gradient": "backward", "weight-gradient": "weight gradients", "reduce": "sum of gradients"}


@attrs.frozen
class PlannedActivity:
    """An action of a plan, as an `Activity`.

    Args:
        action: of the plan.
        stage_ranks: the ranks of a stage, who meet in a reduction.
    """

    action: Action
    stage_ranks: Callable[[StageId], tuple[int, ...]]

    def describe(self) -> str:
        """Return what it does, as ``forward of vision stage 0, microbatch 1``."""
        action = self.action
        text = f"{_WORDS.get(action.kind, action.kind)} of {action.module} stage {action.stage}"
        if not action.microbatches:
            return text
        noun = "microbatches" if len(action.microbatches) > 1 else "microbatch"
        return f"{text}, {noun} {show_ranks(action.microbatches)}"

    def collective_ranks(self) -> tuple[int, ...]:
        """Return the ranks of a reduction; in other actions ranks meet in collectives, which the stack shows."""
        return self.stage_ranks(self.action.stage_id) if self.action.kind == "reduce" else ()


@attrs.frozen
class PlanProgress:
    """Reports the actions and waits of the executor to the heartbeat of this process.

    It is a `mimo.schedule.runtime.Progress`.

    Args:
        heartbeat: of this process.
        stage_ranks: the ranks of a stage.
    """

    heartbeat: Heartbeat
    stage_ranks: Callable[[StageId], tuple[int, ...]]

    def begin(self, action: Action | None) -> None:
        """Report the action that begins; None: all are done."""
        self.heartbeat.begin(None if action is None else PlannedActivity(action, self.stage_ranks))

    def wait(self, edge: str, peer: int) -> None:
        """Report that rows of an edge are awaited from another rank, or that it takes those sent to it."""
        self.heartbeat.wait(edge, peer)

    def resume(self) -> None:
        """Report that they have come, or have been taken."""
        self.heartbeat.resume()
