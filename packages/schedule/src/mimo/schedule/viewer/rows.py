"""The rows of a timeline: ranks that did all alike share one, and what each did and waited for adds up there."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Bar, Timeline, ranks_text

DRAIN = "drain"
"""Cause of the time between a rank's last action and the end of the step."""
UNKNOWN = "unknown"
"""Cause of a gap of which the timeline says nothing."""


@attrs.frozen(kw_only=True)
class Row:
    """Ranks that did the same at the same times.

    Args:
        ranks: which.
        bars: what they did, by start.
        seconds: of the whole step.
        memory: bytes kept by module, and since when; empty where unknown.
    """

    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]
    seconds: float
    memory: tuple[tuple[float, Mapping[str, int]], ...] = ()

    @property
    def name(self) -> str:
        """What the row is called: ``rank 3``, or ``ranks 0-127``."""
        return ranks_text(self.ranks)

    @property
    def busy(self) -> float:
        """Seconds in which the ranks did something."""
        return sum(bar.finish - bar.start for bar in self.bars)

    @property
    def idle(self) -> Mapping[str, float]:
        """Seconds in which they did nothing, by cause; with `busy` they make up the step."""
        found: dict[str, float] = {}
        ends = (0, *(bar.finish for bar in self.bars))
        for finished, bar in zip(ends, self.bars, strict=False):  # the last end has no bar after it
            gap = bar.start - finished
            told = min(bar.waited, gap) if bar.cause else 0
            for cause, seconds in ((bar.cause, told), (UNKNOWN, gap - told)):
                if seconds > 0:
                    found[cause] = found.get(cause, 0) + seconds
        if self.seconds > ends[-1]:
            found[DRAIN] = self.seconds - ends[-1]
        return found

    @property
    def peak(self) -> int:
        """Most bytes kept at once."""
        return max((sum(kept.values()) for _, kept in self.memory), default=0)


def rows_of(timeline: Timeline) -> tuple[Row, ...]:
    """Return the rows of a timeline by their first rank, those of ranks that did nothing included."""
    by_ranks: dict[tuple[int, ...], list[Bar]] = {}
    for bar in timeline.bars:
        by_ranks.setdefault(bar.ranks, []).append(bar)
    shares: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in timeline.ranks}
    for ranks in by_ranks:
        for rank in ranks:
            shares[rank].append(ranks)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, shared in shares.items():
        alike.setdefault(tuple(shared), []).append(rank)
    seconds = timeline.seconds
    rows = []
    for parts, members in alike.items():
        bars = sorted((bar for part in parts for bar in by_ranks[part]), key=lambda bar: (bar.start, bar.finish))
        known = [timeline.memory[rank] for rank in members if rank in timeline.memory]
        rows.append(
            Row(ranks=tuple(members), bars=tuple(bars), seconds=seconds, memory=known[0] if known else ()),
        )
    return tuple(sorted(rows, key=lambda row: row.ranks))


def modules_of(timelines: tuple[Timeline, ...]) -> tuple[str, ...]:
    """Return the modules that timelines show, as they first appear."""
    return tuple(dict.fromkeys(bar.action.module for timeline in timelines for bar in timeline.bars))
