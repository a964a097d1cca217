"""The result of a simulation: a timeline, the step's seconds, and for each rank its waits and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import attrs

from mimo.schedule.plan import Timeline, Transfer
from mimo.schedule.simulator.clock import Clock

_MemoryCurve = tuple[tuple[float, Mapping[str, int]], ...]


@attrs.frozen(kw_only=True)
class Simulation:
    """One simulated step.

    Args:
        timeline: what each rank did, and when.
        seconds: of the step, reductions included, without the all-reduce of the world.
        bubble: of the rank whose computations span the longest time from the first to the last: that time, less the
            computations themselves.
        work: by rank, seconds in computations and reductions.
        bubbles: by rank, all other seconds of the step, by cause: ``warm-up`` before its first computation, ``drain``
            after its last action, and between them the module whose work was not done, ``transfer`` of what was, and
            ``peers`` of its groups.
        peak_bytes: by rank, the peak activation memory of each of its modules.
        peak_total: by rank, the peak activation memory of all its modules together.
    """

    timeline: Timeline
    seconds: float
    bubble: float
    work: Mapping[int, float]
    bubbles: Mapping[int, Mapping[str, float]]
    peak_bytes: Mapping[int, Mapping[str, int]]
    peak_total: Mapping[int, int]

    @classmethod
    def of(
        cls, name: str, ranks: tuple[int, ...], clocks: Sequence[Clock], transfers: Sequence[Transfer]
    ) -> Simulation:
        """Return the result from clocks at the end of their lists."""
        spans = [(clock.last - clock.first, clock.computed) for clock in clocks if clock.first is not None]
        longest, computed = max(spans, key=lambda span: (span[0], span[0] - span[1]), default=(0, 0))
        memory: dict[int, _MemoryCurve] = {}
        peaks: dict[int, Mapping[str, int]] = {}
        totals: dict[int, int] = {}
        for clock in clocks:
            moments, peak, total = _memory(clock)
            memory |= dict.fromkeys(clock.ranks, moments)
            peaks |= dict.fromkeys(clock.ranks, peak)
            totals |= dict.fromkeys(clock.ranks, total)
        timeline = Timeline(
            name=name,
            ranks=ranks,
            bars=tuple(bar for clock in clocks for bar in clock.bars),
            transfers=tuple(transfers),
            memory=memory,
        )
        return cls(
            timeline=timeline,
            seconds=timeline.seconds,
            bubble=longest - computed,
            work={rank: clock.work for clock in clocks for rank in clock.ranks},
            bubbles={rank: clock.idle for clock in clocks for rank in clock.ranks},
            peak_bytes=peaks,
            peak_total=totals,
        )


def _memory(clock: Clock) -> tuple[_MemoryCurve, Mapping[str, int], int]:
    """Return an actor's memory over time, and its peaks, by module and in total."""
    moments: list[tuple[float, Mapping[str, int]]] = []
    now = {action.module: 0 for action in clock.actions}
    peaks = dict(now)
    total = highest = 0
    for time, module, change in sorted(clock.changes, key=itemgetter(0)):
        now[module] += change
        total += change
        peaks[module] = max(peaks[module], now[module])
        highest = max(highest, total)
        if moments and moments[-1][0] == time:
            moments.pop()
        moments.append((time, dict(now)))
    return tuple(moments), peaks, highest
