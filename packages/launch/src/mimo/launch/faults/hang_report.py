"""Who holds up a run that stands still, told from what each rank says of itself, or doesn't."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mimo.launch.process.heartbeat import Status
from mimo.topology import show_ranks

_LINES = 16
"""Most lines of ranks that wait: those of thousands of ranks are few when alike are told together."""


def show_waits(marks: Mapping[int, Status]) -> str:
    """Return a line for each rank that waits for another one in what its task tells; ranks alike share one."""
    alike: dict[str, list[int]] = {}
    for rank, mark in sorted(marks.items()):
        if mark.waits and mark.doing and not mark.left:
            alike.setdefault(mark.told(rank), []).append(rank)
    lines = [
        f"{_name(ranks)} waited {_seconds(max(marks[rank].seconds for rank in ranks))} {text}"
        for text, ranks in alike.items()
    ]
    if len(lines) > _LINES:
        rest = [rank for ranks in list(alike.values())[_LINES:] for rank in ranks]
        lines[_LINES:] = [f"{_name(sorted(rest))} waited too"]
    return "\n".join(lines)


def show_silent(silent: Collection[int], last: Mapping[int, Status]) -> str:
    """Return which ranks no longer say anything, and where each was heard of last.

    Args:
        silent: the ranks.
        last: what they have put up before, as far as they have.
    """
    alike: dict[str, list[int]] = {}
    for rank in sorted(silent):
        mark = last.get(rank)
        text = "never heard of" if mark is None else f"last heard of in {mark.place or 'its start'}"
        alike.setdefault(text, []).append(rank)
    told = "; ".join(f"{_name(ranks)} {_verb(ranks)} {text}" for text, ranks in list(alike.items())[:_LINES])
    ranks = sorted(silent)
    pronoun = "it was" if len(ranks) == 1 else "they were"
    return (
        f"{_name(ranks)} no longer {'answers' if len(ranks) == 1 else 'answer'}: {pronoun} killed or stopped, "
        f"or a machine or its network is gone. {told[0].upper()}{told[1:]}."
    )


def show_standstill(marks: Mapping[int, Status], timeout: float) -> str:
    """Return why no rank has gone on for as long as it may, all of them still answering."""
    hangs = {rank: mark for rank, mark in marks.items() if not mark.waits and not mark.left and mark.doing}
    alike: dict[str, list[int]] = {}
    for rank, mark in sorted(hangs.items()):
        alike.setdefault(mark.place + (f", at {mark.where}" if mark.where else ""), []).append(rank)
    told = [
        f"{_name(ranks)} did not go on for {_seconds(max(hangs[rank].seconds for rank in ranks))} in {text}."
        for text, ranks in list(alike.items())[:_LINES]
    ]
    return " ".join([*(told or ["All ranks waited for each other."]), f"run.timeout is {timeout:g} s."])


def _name(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {show_ranks(list(ranks))}"


def _verb(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 -- two digits are enough
