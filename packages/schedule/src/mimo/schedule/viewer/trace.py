"""Timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Every timeline is a process, every row of it a thread; messages and memory have their own tracks. The format is
that of "Trace Event Format" (Google, 2016): times in microseconds, complete events ``X``, nestable asynchronous events
``b`` and ``e``, counters ``C`` and metadata ``M``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mimo.schedule.plan import Bar, Timeline, ranks_text
from mimo.schedule.viewer.rows import Row, rows_of

_MICROSECONDS = 1e6

TraceEvent = Mapping[str, Any]


def write_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write timelines as one trace.

    Args:
        path: of a JSON file.
        timelines: one process each, in this order. Ranks that did the same share a thread.
    """
    events = [event for number, timeline in enumerate(timelines) for event in _events(timeline, number)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)
    path.write_text(text, encoding="utf-8")


def _events(timeline: Timeline, process: int) -> Iterator[TraceEvent]:
    yield _metadata(process, 0, "process_name", name=timeline.name)
    yield _metadata(process, 0, "process_sort_index", sort_index=process)
    for thread, row in enumerate(rows_of(timeline)):
        yield _metadata(process, thread, "thread_name", name=row.name)
        yield _metadata(process, thread, "thread_sort_index", sort_index=thread)
        for bar in row.bars:
            yield _bar(bar, process, thread)
        yield from _memory(row, process)
    yield from _messages(timeline, process)


def _metadata(process: int, thread: int, what: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": what, "args": args}


def _bar(bar: Bar, process: int, thread: int) -> TraceEvent:
    action = bar.action
    args: dict[str, Any] = {"stage": action.stage, "microbatches": list(action.microbatches)}
    if action.edge is not None:
        args["edge"] = action.edge
    if bar.waited:
        args |= {"waited_us": _microseconds(bar.waited), "cause": bar.cause}
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": _microseconds(bar.start),
        "dur": _microseconds(bar.finish - bar.start),
        "name": " ".join([action.kind, ",".join(map(str, action.microbatches))]).rstrip(),
        "cat": action.module,
        "args": args,
    }


def _memory(row: Row, process: int) -> Iterator[TraceEvent]:
    for moment, sizes in row.memory:
        yield {
            "ph": "C",
            "pid": process,
            "tid": 0,
            "ts": _microseconds(moment),
            "name": f"bytes kept, {row.name}",
            "args": dict(sizes),
        }


def _messages(timeline: Timeline, process: int) -> Iterator[TraceEvent]:
    for number, transfer in enumerate(timeline.transfers):
        action = transfer.action
        about = {
            "pid": process,
            "tid": 0,
            "id": f"{process}.{number}",
            "name": action.edge or action.module,
            "cat": "message",
        }
        args = {
            "from": ranks_text(transfer.sources),
            "to": ranks_text(transfer.targets),
            "microbatches": list(action.microbatches),
        }
        yield {"ph": "b", "ts": _microseconds(transfer.start), **about, "args": args}
        yield {"ph": "e", "ts": _microseconds(transfer.finish), **about, "args": {}}


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * _MICROSECONDS, 3)
