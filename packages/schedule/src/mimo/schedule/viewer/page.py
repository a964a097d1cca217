"""Timelines as one HTML page that needs nothing else: ranks as rows, modules as colours, time to the right.

The parts of the page are in ``assets/``; this joins them with the timelines as JSON, which the script draws.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from mimo.schedule.plan import Bar, Timeline
from mimo.schedule.viewer.rows import Row, modules_of, rows_of

_DIGITS = 9
_SCRIPTS = ("words.js", "pens.js", "chart.js", "about.js", "page.js")


def write_page(path: Path, timelines: Iterable[Timeline], *, title: str = "Timeline of a step") -> None:
    """Write timelines as a page, one under the other on one scale of time.

    Args:
        path: of an HTML file, which contains its style, script and data, and loads nothing.
        timelines: such as a simulated step and a measured one.
        title: of the page.
    """
    all_timelines = tuple(timelines)
    modules = modules_of(all_timelines)
    data = {"modules": modules, "timelines": [_timeline(timeline, modules) for timeline in all_timelines]}
    parts = {
        "title": html.escape(title),
        "style": _part("page.css"),
        "script": "\n".join(map(_part, _SCRIPTS)),
        "data": _inside_script(json.dumps(data, separators=(",", ":"), allow_nan=False)),
    }
    text = _part("page.html")
    before, *rest = text.split("{{")
    pieces = (piece.split("}}", 1) for piece in rest)  # in one pass, so that no name in the data is replaced
    path.write_text(before + "".join(parts[name] + after for name, after in pieces), encoding="utf-8")


def _part(name: str) -> str:
    return (files("mimo.schedule.viewer") / "assets" / name).read_text(encoding="utf-8")


def _inside_script(text: str) -> str:
    """Return JSON in which no browser finds the end of the script around it, or a comment."""
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _timeline(timeline: Timeline, modules: tuple[str, ...]) -> Mapping[str, Any]:
    rows = rows_of(timeline)
    row_of = {rank: number for number, row in enumerate(rows) for rank in row.ranks}

    def rows_at(ranks: Iterable[int]) -> list[int]:
        return sorted({row_of[rank] for rank in ranks})

    return {
        "name": timeline.name,
        "seconds": _number(timeline.seconds),
        "bars": len(timeline.bars),
        "rows": [_row(row, modules) for row in rows],
        "transfers": [
            {
                "edge": transfer.action.edge,
                "microbatches": transfer.action.microbatches,
                "module": modules.index(transfer.action.module) if transfer.action.module in modules else 0,
                "sources": rows_at(transfer.sources),
                "targets": rows_at(transfer.targets),
                "start": _number(transfer.start),
                "finish": _number(transfer.finish),
            }
            for transfer in timeline.transfers
        ],
    }


def _row(row: Row, modules: tuple[str, ...]) -> Mapping[str, Any]:
    return {
        "name": row.name,
        "ranks": len(row.ranks),
        "busy": _number(row.busy),
        "idle": {cause: _number(seconds) for cause, seconds in row.idle.items()},
        "bars": [_bar(bar, modules) for bar in row.bars],
        "memory": [[_number(moment), [sizes.get(module, 0) for module in modules]] for moment, sizes in row.memory],
    }


def _bar(bar: Bar, modules: tuple[str, ...]) -> list[Any]:
    """Return a bar as a list, since a page may hold a hundred thousand; the script names the indices."""
    action = bar.action
    return [
        action.kind,
        modules.index(action.module),
        action.stage,
        action.microbatches,
        _number(bar.start),
        _number(bar.finish),
        _number(bar.waited),
        bar.cause,
    ]


def _number(value: float) -> float:
    return float(f"{float(value):.{_DIGITS}g}")
