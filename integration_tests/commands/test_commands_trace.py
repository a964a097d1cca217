"""`logging.trace`: a run leaves traces and pages of some steps, each measured and simulated."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

from commands import here, read_metrics, succeed

from mimo.schedule import Plan

SETTINGS = """
[run]
name = "text"
steps = 3
global_batch = 4
device = "cpu"
directory = "{directory}"
[data]
plugin = "jsonl"
path = "{directory}.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-1"
pp = 2
config = {{ hidden = 16, layers = 2, heads = 2, intermediate = 16 }}
[logging]
console = false
"""


def test_commands_ranks_write_profiles_of_the_steps_that_are_named(tmp_path: Path) -> None:
    """Steps 2 and 3, the last, in one trace of each rank: all that its plan does in them, and operations inside."""
    (tmp_path / "run.jsonl").write_text('{"text": "to be"}\n' * 8)
    file, run = tmp_path / "text.toml", tmp_path / "run"
    file.write_text(SETTINGS.format(directory=run))
    assert here("train", file, "logging.profile=3-2").refused("logging.profile: expected one step, or the first and")
    assert here("train", file, "logging.profile=0").refused("logging.profile: expected one step, or the first and")
    assert here("train", file, "logging.profile=true").refused("logging.profile: expected a whole number or text")
    assert here("train", file, "logging.profile=4").refused("logging.profile: expected steps that the run has, from 1")
    assert here("train", file, "logging.profile=4-5").refused(
        "logging.profile: expected steps that the run has, from 1"
    )
    succeed("train", file, "logging.profile=2-9")
    plan = Plan.from_json((run / "plan.json").read_text())
    assert sorted(path.name for path in (run / "profiles").iterdir()) == [
        f"steps_00000002_rank{rank}.json.gz" for rank in (0, 1)
    ]
    for rank in (0, 1):
        with gzip.open(run / "profiles" / f"steps_00000002_rank{rank}.json.gz", "rt") as trace:
            events = [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]
        done = [event for event in events if event.get("cat") == "user_annotation" and " of language" in event["name"]]
        assert len(done) == 2 * len(plan.actions_of(rank))
        (first, *_) = [event for event in done if event["name"].startswith("forward")]
        inside = [event for event in events if first["ts"] <= event["ts"] <= first["ts"] + first["dur"]]
        assert any(event["name"] == "aten::mm" or event["name"] == "aten::addmm" for event in inside)


def test_commands_a_run_leaves_traces_where_it_is_asked_for_them(tmp_path: Path) -> None:
    """Of steps 2 and 3, the last: every computation and reduction of every rank, in its order, within the step."""
    (tmp_path / "run.jsonl").write_text('{"text": "to be"}\n' * 8)
    file, run = tmp_path / "text.toml", tmp_path / "run"
    file.write_text(SETTINGS.format(directory=run))
    succeed("train", file, "logging.trace=true")
    steps, _ = read_metrics(run)
    plan = Plan.from_json((run / "plan.json").read_text())
    assert sorted(path.name for path in (run / "traces").iterdir()) == [
        "step_00000002.html",
        "step_00000002.json",
        "step_00000003.html",
        "step_00000003.json",
    ]
    for step in (2, 3):
        events = json.loads((run / "traces" / f"step_{step:08d}.json").read_text())["traceEvents"]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert names == [f"1f1b, measured in step {step}", f"1f1b, simulated with the mean times of step {step}"]
        bars = [event for event in events if event["ph"] == "X"]
        assert len({count for _, count in Counter(event["pid"] for event in bars).items()}) == 1
        begun = min(event["ts"] for event in bars if (event["pid"], event["tid"]) == (0, 0))
        for rank in (0, 1):
            done = [event for event in bars if (event["pid"], event["tid"]) == (0, rank)]
            planned = [action for action in plan.actions_of(rank) if action.kind not in ("send", "receive")]
            assert [re.split(r"\W", event["name"])[0] for event in done] == [action.kind for action in planned]
            assert [event["args"]["microbatches"] for event in done] == [list(one.microbatches) for one in planned]
            assert sorted(event["ts"] for event in done) == [event["ts"] for event in done]
            assert done[-1]["ts"] + done[-1]["dur"] - begun < steps[step - 1]["seconds"] * 1e6


def test_commands_a_run_leaves_no_traces_unasked(tmp_path: Path) -> None:
    """Nothing is recorded by default."""
    (tmp_path / "run.jsonl").write_text('{"text": "to be"}\n' * 8)
    file, run = tmp_path / "text.toml", tmp_path / "run"
    file.write_text(SETTINGS.format(directory=run))
    succeed("train", file, "run.steps=2")
    assert not (run / "traces").exists()
