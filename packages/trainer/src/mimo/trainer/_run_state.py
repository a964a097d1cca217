"""What a checkpoint of a run holds beside modules and optimizers, under names that nothing else may have."""

from __future__ import annotations

from collections.abc import Iterable

from mimo.hooks import Common, PluginError, Stateful, StateTree
from mimo.trainer._engine import Engine


def other_state(engine: Engine, parts: Iterable[Stateful], step: int) -> dict[str, StateTree]:
    """Return what a checkpoint holds beside modules and optimizers, whose names nothing else may have."""
    taken = {"optimizer", "progress", *(module.name for module in engine.job.modules)}
    others: dict[str, StateTree] = {"progress": {"step": Common(step)}}
    for part in parts:
        if part.name in taken:
            raise PluginError(
                f"state {part.name!r}", expected="a name that no module and nothing of ours has", got=repr(part.name)
            )
        others[part.name] = part.state()
    return others
