"""What the emulator knows of passes: data come pass by pass, and what one computation leaves the next finds by it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Action, microbatches_text
from mimo.topology import ModuleGraph, StageId

_USES = (("backward", "forward"), ("input-gradient", "forward"), ("weight-gradient", "input-gradient"))
"""Kinds of computations, and the kind before each that leaves it what it works on."""


@attrs.define(kw_only=True, eq=False)
class EmulatedPasses:
    """What computations have left for the next ones of their passes, by rank and all microbatches of the pass.

    Args:
        come: by module the passes in which its data come.
    """

    come: Mapping[str, frozenset[tuple[int, ...]]]
    left: set[tuple[int, str, StageId, tuple[int, ...]]] = attrs.field(factory=set)

    @classmethod
    def of(cls, graph: ModuleGraph, microbatches: int) -> EmulatedPasses:
        """Return those of a step before anything is done."""
        return cls(
            come={
                module.name: frozenset(
                    tuple(module.first(microbatches) + microbatch for microbatch in served)
                    for served in module.passes(microbatches)
                )
                for module in graph.modules
            }
        )

    def misfit(self, action: Action, rank: int) -> tuple[str, str] | None:
        """Do a computation; return what was expected and what got where it serves other microbatches than a pass."""
        stage, served = action.stage_id, action.microbatches
        if action.kind == "forward" and served not in self.come[action.module]:
            got = microbatches_text(served) if served else "none"
            return f"microbatches that come as one pass of {action.module}", got
        for kind, before in _USES:
            if kind == action.kind:
                if (rank, before, stage, served) not in self.left:
                    return f"{before} of just these microbatches before it", "none made so far"
                self.left.remove((rank, before, stage, served))
        if action.kind in ("forward", "input-gradient"):
            self.left.add((rank, action.kind, stage, served))
        return None
