"""A timeline: when each rank did what in one step, simulated or measured. What the viewer shows."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan.plan import Action


@attrs.frozen(kw_only=True)
class Bar:
    """One computation or reduction.

    Args:
        ranks: those that did it alike.
        action: what.
        start, finish: seconds since the step began.
        waited: seconds in which the ranks did nothing just before.
        cause: for what: ``warm-up``, ``transfer``, ``peers`` (others of its group), or the name of a module whose work
            was not done; empty where ``waited`` is 0.
    """

    ranks: tuple[int, ...]
    action: Action
    start: float
    finish: float
    waited: float = 0
    cause: str = ""


@attrs.frozen(kw_only=True)
class Transfer:
    """One message on its way, from the moment that it could leave."""

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
        memory: by rank, where known: moments at which what is kept changed, ascending, with the bytes by module after.
    """

    name: str
    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: Mapping[int, tuple[tuple[float, Mapping[str, int]], ...]] = attrs.field(factory=dict)

    @property
    def seconds(self) -> float:
        """When the last one was done."""
        return max((bar.finish for bar in self.bars), default=0)
