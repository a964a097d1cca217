"""What `day.py` writes: a line a test in results.jsonl, and a summary that can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

Status = Literal["passed", "failed", "timed out", "skipped", "not run"]
RESULTS, SUMMARY, LOGS = "results.jsonl", "summary.md", "logs.txt"
MAX_LOG_BYTES = 1_000_000
"""Of a test's log, its end."""


@attrs.frozen(kw_only=True)
class Result:
    """How one test ended.

    Args:
        test: its name.
        status: ``skipped`` where it says itself that it can't run here, ``not run`` where no time was left.
        figures: what it found.
        bound: what that is held to, in words.
        seconds: that it took.
        device: what its device is called.
        torch: version.
        why: bounds that were missed, or the end of what a failed test printed.
    """

    test: str
    status: Status
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    bound: str
    seconds: float = 0.0
    device: str = ""
    torch: str = ""
    why: Sequence[str] = ()


def append(folder: Path, result: Result) -> None:
    """Append a line to results.jsonl."""
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(attrs.asdict(result), allow_nan=True) + "\n")


def keep_log(folder: Path, result: Result, said: str) -> None:
    """Append all that a test has printed to logs.txt."""
    kept = said.encode()[-MAX_LOG_BYTES:].decode(errors="replace")
    with (folder / LOGS).open("a", encoding="utf-8") as file:
        file.write(f"======== {result.test}: {result.status}\n{kept}\n")


def summarise(folder: Path, results: Sequence[Result], *, about: Sequence[str]) -> None:
    """Write summary.md anew.

    Args:
        folder: where it lies.
        results: of all tests of the slice, those that were not run included.
        about: lines on the machine and what is tested.
    """
    counts = {status: sum(result.status == status for result in results) for status in get_args(Status)}
    lines = [
        "# One day on a GPU",
        "",
        *about,
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items() if count) + ".",
        "",
        "| test | status | seconds | device | torch |",
        "|---|---|---|---|---|",
        *(f"| {one.test} | {one.status} | {one.seconds:.1f} | {one.device} | {one.torch} |" for one in results),
    ]
    for one in results:
        lines += ["", f"## {one.test}: {one.status}", "", f"Bound: {one.bound}.", ""]
        lines += [f"- {_flat(line)}" for line in one.why]
        lines += [f"- {name}: {_flat(json.dumps(value))}" for name, value in one.figures.items()]
    part = folder / f"{SUMMARY}.part"
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(folder / SUMMARY)


def _flat(text: str) -> str:
    return " ".join(text.split())
