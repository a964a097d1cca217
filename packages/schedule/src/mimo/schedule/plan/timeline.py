"""A timeline: when each rank did what in one step, simulated or measured; the viewer draws it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan.plan import Action


@attrs.frozen(kw_only=True)
class Bar:
    """One computation or reduction.

    Args:
        ranks: those that did it at the same time.
        action: what they did.
        start, finish: seconds since the step began.
        waited: idle seconds of the ranks just before.
        cause: what they waited for: ``warm-up``, ``transfer``, ``peers`` (other ranks of the group), or the module
            whose work was not done; empty where ``waited`` is 0.
        causes: seconds of ``waited`` by cause, if there are several; ``cause`` is the longest of them.
    """

    ranks: tuple[int, ...]
    action: Action
    start: float
    finish: float
    waited: float = 0
    cause: str = ""
    causes: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Transfer:
    """One message, from the moment that it could leave."""

    action: Action
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    start: float
    finish: float


@attrs.frozen(kw_only=True)
class Timeline:
    """One step.

    Args:
        name: what it shows, such as ``simulated`` or ``measured, step 12``.
        ranks: all of them, ascending, those that did nothing included.
        bars: in the order of ranks and time.
        transfers: where known.
        memory: by rank, where known: ascending times at which activation memory changed, with the bytes by module
            since.
    """

    name: str
    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: Mapping[int, tuple[tuple[float, Mapping[str, int]], ...]] = attrs.field(factory=dict)

    @property
    def seconds(self) -> float:
        """When the last action ended."""
        return max((bar.finish for bar in self.bars), default=0)
