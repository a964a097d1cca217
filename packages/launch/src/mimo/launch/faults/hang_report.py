"""Which ranks block a run that makes no progress, found from the status of each rank or its absence."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mimo.launch.process.heartbeat import Status
from mimo.topology import show_ranks

_LINES = 16
"""Maximum number of lines; ranks with identical text share one."""


def show_waits(statuses: Mapping[int, Status]) -> str:
    """Return a line for each rank that waits for another one; ranks with identical text share one."""
    by_text: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        if status.waits and status.doing and not status.left:
            by_text.setdefault(status.describe_wait(rank), []).append(rank)
    lines = [
        f"{_name(ranks)} waited {_seconds(max(statuses[rank].seconds for rank in ranks))} {text}"
        for text, ranks in by_text.items()
    ]
    if len(lines) > _LINES:
        rest = [rank for ranks in list(by_text.values())[_LINES:] for rank in ranks]
        lines[_LINES:] = [f"{_name(sorted(rest))} waited too"]
    return "\n".join(lines)


def show_silent(silent: Collection[int], last: Mapping[int, Status]) -> str:
    """Return which ranks no longer answer, and what each did by its last status.

    Args:
        silent: the ranks.
        last: the last status of those that have stored one.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(silent):
        status = last.get(rank)
        text = "never heard of" if status is None else f"last heard of in {status.activity or 'its start'}"
        by_text.setdefault(text, []).append(rank)
    last_seen = "; ".join(f"{_name(ranks)} {_verb(ranks)} {text}" for text, ranks in list(by_text.items())[:_LINES])
    ranks = sorted(silent)
    pronoun = "it was" if len(ranks) == 1 else "they were"
    return (
        f"{_name(ranks)} no longer {'answers' if len(ranks) == 1 else 'answer'}: {pronoun} killed or stopped, "
        f"or a machine or its network is gone. {last_seen[0].upper()}{last_seen[1:]}."
    )


def show_standstill(statuses: Mapping[int, Status], timeout: float) -> str:
    """Return which ranks made no progress for too long, where all of them still answer."""
    hangs = {rank: status for rank, status in statuses.items() if not status.waits and not status.left and status.doing}
    by_text: dict[str, list[int]] = {}
    for rank, status in sorted(hangs.items()):
        by_text.setdefault(status.activity + (f", at {status.where}" if status.where else ""), []).append(rank)
    blocking = [
        f"{_name(ranks)} did not go on for {_seconds(max(hangs[rank].seconds for rank in ranks))} in {text}."
        for text, ranks in list(by_text.items())[:_LINES]
    ]
    return " ".join([*(blocking or ["All ranks waited for each other."]), f"run.timeout is {timeout:g} s."])


def _name(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {show_ranks(list(ranks))}"


def _verb(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 -- two digits are enough
