"""The rows of a timeline: ranks that did the same at the same times share one, with sums of their work and waits."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Bar, Timeline, ranks_text

DRAIN = "drain"
"""Cause of the time between a rank's last action and the end of the step."""
UNKNOWN = "unknown"
"""Cause of a gap that the timeline does not explain."""


@attrs.frozen(kw_only=True)
class Row:
    """Ranks that did the same at the same times.

    Args:
        ranks: which.
        bars: what they did, by start.
        seconds: of the whole step.
        memory: times with the activation bytes by module since; empty where unknown.
    """

    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]
    seconds: float
    memory: tuple[tuple[float, Mapping[str, int]], ...] = ()

    @property
    def name(self) -> str:
        """Name of the row: ``rank 3``, or ``ranks 0-127``."""
        return ranks_text(self.ranks)

    @property
    def busy(self) -> float:
        """Seconds in which the ranks worked."""
        return sum(bar.finish - bar.start for bar in self.bars)

    @property
    def idle(self) -> Mapping[str, float]:
        """Idle seconds by cause; with `busy` they sum to the step."""
        idle: dict[str, float] = {}
        ends = (0, *(bar.finish for bar in self.bars))
        for finished, bar in zip(ends, self.bars, strict=False):  # the last end has no bar after it
            gap = bar.start - finished
            explained = min(bar.waited, gap) if bar.cause else 0
            causes = bar.causes or {bar.cause: explained}
            for cause, seconds in (*causes.items(), (UNKNOWN, gap - explained)):
                if seconds > 0:
                    idle[cause] = idle.get(cause, 0) + seconds
        if self.seconds > ends[-1]:
            idle[DRAIN] = self.seconds - ends[-1]
        return idle

    @property
    def peak(self) -> int:
        """Most activation bytes at one time."""
        return max((sum(sizes.values()) for _, sizes in self.memory), default=0)


def rows_of(timeline: Timeline) -> tuple[Row, ...]:
    """Return the rows of a timeline in the order of their first ranks, idle ranks included."""
    by_ranks: dict[tuple[int, ...], list[Bar]] = {}
    for bar in timeline.bars:
        by_ranks.setdefault(bar.ranks, []).append(bar)
    shares: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in timeline.ranks}
    for ranks in by_ranks:
        for rank in ranks:
            shares[rank].append(ranks)
    same: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, shared in shares.items():
        same.setdefault(tuple(shared), []).append(rank)
    seconds = timeline.seconds
    rows = []
    for parts, members in same.items():
        bars = sorted((bar for part in parts for bar in by_ranks[part]), key=lambda bar: (bar.start, bar.finish))
        known = [timeline.memory[rank] for rank in members if rank in timeline.memory]
        rows.append(
            Row(ranks=tuple(members), bars=tuple(bars), seconds=seconds, memory=known[0] if known else ()),
        )
    return tuple(sorted(rows, key=lambda row: row.ranks))


def modules_of(timelines: tuple[Timeline, ...]) -> tuple[str, ...]:
    """Return the modules of timelines in the order of their first bars."""
    return tuple(dict.fromkeys(bar.action.module for timeline in timelines for bar in timeline.bars))
