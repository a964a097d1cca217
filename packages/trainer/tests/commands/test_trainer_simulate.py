"""`mimo simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mimo.trainer.commands.main import run
from mimo.trainer.commands.tables.simulation import show_seconds
from mimo.trainer.config.toml import read_settings
from mimo.trainer.resolving.resolve import resolve

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 8
directory = "{directory}/run"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-3"
pp = 2
config = {{ hidden = 16, layers = 2, heads = 2, intermediate = 16 }}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A settings file of a model that reads text alone, over two lanes of two stages; 4 microbatches a step."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 8)
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return str(path)


def test_simulate_shows_time_bubbles_and_memory_by_rank(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that do the same share a line; work and causes make up the step."""
    assert run(["simulate", file, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "1f1b, 4 microbatches: a step takes" in out
    assert "simulated by formula" in out
    lines = out.splitlines()
    heads = next(line.split() for line in lines if line.startswith("ranks   work"))
    assert heads[:3] == ["ranks", "work", "warm-up"]
    shares = [line.split() for line in lines if line.startswith(("0-1 ", "2-3 ")) and "%" in line]
    assert [share[0] for share in shares] == ["0-1", "2-3"]
    for share in shares:
        assert sum(float(cell.rstrip("%")) for cell in share[1:] if cell != "-") == pytest.approx(100, abs=0.3)
    kept = [line.split()[1:] for line in lines if line.startswith(("0-1 ", "2-3 ")) and "MiB" in line]
    assert [line[:2] == line[2:] and line[1] == "MiB" for line in kept] == [True, True]


def test_what_placing_by_cost_gains_is_shown(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of ragged samples: a step takes less by cost than by count, and its slowest lanes are nearer to the mean."""
    texts = ["a" * (400 if sample % 2 else 4) for sample in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    overrides = ["run.micro_batch=2", "run.seed=2"]
    assert run(["simulate", file, "--out", str(tmp_path / "out"), *overrides]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("as the slowest lanes"))
    count, cost = re.findall(r"([\d.]+) [mµ]s placed", line)
    assert float(cost) < float(count)
    assert line.endswith("(here by cost)")
    assert run(["check", file, *overrides, "data.balance=count"]) == 0
    *_, heads, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["module", "by", "count", "(here)", "by", "cost"]
    assert float(row.split()[2]) == pytest.approx(1.0, abs=0.02)
    assert float(row.split()[1]) > 1.2


def test_simulate_writes_a_trace_and_a_page(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bar for each computation and reduction of each actor: 4 forwards, 4 backwards and 1 reduction of 2 stages."""
    folder = tmp_path / "out" / "deep"
    assert run(["simulate", file, "--out", str(folder)]) == 0
    assert capsys.readouterr().out.split()[-2:] == [str(folder / "trace.json"), str(folder / "timeline.html")]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 18
    assert '"bars":18' in (folder / "timeline.html").read_text()
    assert not (tmp_path / "run").exists()


def test_simulate_writes_into_the_current_folder_by_default(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the current folder."""
    monkeypatch.chdir(tmp_path)
    assert run(["simulate", file, "run.global_batch=4"]) == 0
    assert (tmp_path / "trace.json").is_file()
    assert '"bars":10' in (tmp_path / "timeline.html").read_text()


def test_simulate_refuses_what_it_cannot_read_or_write(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with code 2."""
    assert run(["simulate", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: expected a readable file" in capsys.readouterr().err
    assert run(["simulate", file, "--profile", str(tmp_path / "none.json")]) == 2
    assert "mimo: schedule.profile: expected a file that can be read" in capsys.readouterr().err
    (tmp_path / "out").touch()
    assert run(["simulate", file, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("mimo: --out: expected a folder that can be written")


def test_simulate_needs_no_torch(file: str, tmp_path: Path) -> None:
    """A plan for many GPUs can be looked at at once, on a laptop."""
    program = (
        "import sys; from mimo.trainer.commands.main import run\n"
        f"code = run(['simulate', {file!r}, '--out', {str(tmp_path)!r}])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (2.5e-6, "2.5 µs"), (0.0123456, "12.35 ms"), (75.25, "75.25 s")],
)
def test_seconds_are_shown_in_a_unit_that_suits_them(seconds: float, text: str) -> None:
    """Four digits of them."""
    assert show_seconds(seconds) == text


def test_simulate_takes_a_plan_from_a_file(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan as runs write it is proved and simulated in place of the schedule's."""
    job = resolve(read_settings(Path(file), ("schedule.plugin=gpipe",)))
    plan = tmp_path / "plan.json"
    plan.write_text(job.plan.to_json())
    assert run(["simulate", file, "--plan", str(plan), "--out", str(tmp_path)]) == 0
    assert "gpipe, 4 microbatches: a step takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("", "plan: expected JSON, got "),
        (
            '{"schedule": "mine", "microbatches": 3, "actors": []}',
            "expected a plan of 4 microbatches, as these settings",
        ),
        ('{"schedule": "mine", "microbatches": 4, "actors": []}', "expected 1 lists of actions"),
        (None, "--plan: expected a plan that can be read, got "),
    ],
    ids=["empty", "of another step", "incomplete", "missing"],
)
def test_simulate_refuses_a_plan_that_does_not_fit(
    wrong: str | None, words: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the cause, and nothing is written."""
    plan = tmp_path / "plan.json"
    if wrong is not None:
        plan.write_text(wrong)
    assert run(["simulate", file, "--plan", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
