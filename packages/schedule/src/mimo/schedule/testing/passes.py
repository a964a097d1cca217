"""Passes in the emulator: samples come pass by pass, and a computation finds what the one before saved for its pass."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Action, microbatches_text
from mimo.topology import ModuleGraph, StageId

_USES = (("backward", "forward"), ("input-gradient", "forward"), ("weight-gradient", "input-gradient"))
"""Kinds of computations, with the kind whose saved values each of them uses."""


@attrs.define(kw_only=True, eq=False)
class EmulatedPasses:
    """What computations have saved for the next ones of their passes, by rank and all microbatches of the pass.

    Args:
        passes: by module, the passes of its samples.
    """

    passes: Mapping[str, frozenset[tuple[int, ...]]]
    saved: set[tuple[int, str, StageId, tuple[int, ...]]] = attrs.field(factory=set)

    @classmethod
    def of(cls, graph: ModuleGraph, microbatches: int) -> EmulatedPasses:
        """Return the passes of a step before its first action."""
        return cls(
            passes={
                module.name: frozenset(
                    tuple(module.first(microbatches) + microbatch for microbatch in served)
                    for served in module.passes(microbatches)
                )
                for module in graph.modules
            }
        )

    def misfit(self, action: Action, rank: int) -> tuple[str, str] | None:
        """Do a computation; if its microbatches are no pass, return what was expected and what it got."""
        stage, served = action.stage_id, action.microbatches
        if action.kind == "forward" and served not in self.passes[action.module]:
            got = microbatches_text(served) if served else "none"
            return f"microbatches that come as one pass of {action.module}", got
        for kind, before in _USES:
            if kind == action.kind:
                if (rank, before, stage, served) not in self.saved:
                    return f"{before} of just these microbatches before it", "none made so far"
                self.saved.remove((rank, before, stage, served))
        if action.kind in ("forward", "input-gradient"):
            self.saved.add((rank, action.kind, stage, served))
        return None
