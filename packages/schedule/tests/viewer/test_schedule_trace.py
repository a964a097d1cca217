"""Traces: events that Perfetto and chrome://tracing read, one for each bar of the timelines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from mimo.schedule import Action, Bar, Timeline, Transfer, write_trace

_FIELDS = {
    "M": {"name", "args"},
    "X": {"name", "cat", "ts", "dur", "args"},
    "C": {"name", "ts", "args"},
    "b": {"name", "cat", "id", "ts", "args"},
    "e": {"name", "cat", "id", "ts", "args"},
}


def _events(path: Path, *timelines: Timeline) -> list[dict[str, Any]]:
    write_trace(path, timelines)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        assert _FIELDS[event["ph"]] | {"ph", "pid", "tid"} <= event.keys(), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    return events


def _timeline(name: str) -> Timeline:
    forward = Action(kind="forward", module="vision", stage=0, microbatches=(0, 1))
    backward = Action(kind="backward", module="language", stage=2, microbatches=(1,))
    reduce = Action(kind="reduce", module="language", stage=2, edge="language.tied")
    message = Action(kind="send", module="vision", stage=0, microbatches=(1,), edge="vision->language")
    return Timeline(
        name=name,
        ranks=(0, 1, 2, 3),
        bars=(
            Bar(ranks=(0, 1), action=forward, start=0, finish=0.5),
            Bar(ranks=(2,), action=backward, start=0.75, finish=1, waited=0.75, cause="vision"),
            Bar(ranks=(2,), action=reduce, start=1, finish=1.25),
        ),
        transfers=(Transfer(action=message, sources=(0, 1), targets=(2,), start=0.5, finish=0.75),),
        memory={2: ((0.75, {"language": 100}), (1, {"language": 0}))},
    )


def test_schedule_trace_has_a_process_for_each_timeline_and_a_thread_for_each_row(tmp_path: Path) -> None:
    """Each named, in the given order, idle ranks included."""
    events = _events(tmp_path / "trace.json", _timeline("simulated"), _timeline("measured"))
    named = [event for event in events if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in named] == [(0, "simulated"), (1, "measured")]
    threads = [event for event in events if event["name"] == "thread_name" and event["pid"] == 1]
    assert [(event["tid"], event["args"]["name"]) for event in threads] == [
        (0, "ranks 0-1"),
        (1, "rank 2"),
        (2, "rank 3"),
    ]
    assert Counter(event["pid"] for event in events if event["ph"] == "X") == {0: 3, 1: 3}


def test_schedule_trace_shows_what_was_done_when_and_after_what_wait(tmp_path: Path) -> None:
    """Times in microseconds, the module as category."""
    events = _events(tmp_path / "trace.json", _timeline("simulated"))
    first, second, third = (event for event in events if event["ph"] == "X")
    assert first == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 0,
        "dur": 500_000,
        "name": "forward 0,1",
        "cat": "vision",
        "args": {"stage": 0, "microbatches": [0, 1]},
    }
    assert (second["ts"], second["dur"], second["cat"]) == (750_000, 250_000, "language")
    assert second["args"] == {"stage": 2, "microbatches": [1], "waited_us": 750_000, "cause": "vision"}
    assert (third["name"], third["args"]["edge"]) == ("reduce", "language.tied")


def test_schedule_trace_has_messages_and_memory_on_tracks_of_their_own(tmp_path: Path) -> None:
    """A message begins and ends under one id; what is kept is a counter by module."""
    events = _events(tmp_path / "trace.json", _timeline("simulated"))
    begins, ends = (event for event in events if event.get("cat") == "message")
    assert (begins["ph"], begins["ts"], ends["ph"], ends["ts"]) == ("b", 500_000, "e", 750_000)
    assert begins["id"] == ends["id"]
    assert begins["name"] == "vision->language"
    assert begins["args"] == {"from": "ranks 0-1", "to": "rank 2", "microbatches": [1]}
    kept = [(event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert kept == [(750_000, {"language": 100}), (1_000_000, {"language": 0})]
