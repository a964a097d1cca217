"""The program for a machine with one GPU: it runs here, on the CPU, and whatever a test of it does is written down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
from _carried import DIGITS
from _results import LOGS, MAX_LOG_BYTES, RESULTS, SUMMARY
from _slices import SLICES, DayTest
from carry import write_digits
from day import LINES, Plan, environ_of, run_all
from house import ROOT

KEYS = ["test", "status", "figures", "bound", "seconds", "device", "torch", "why"]
FOUND = {"figures": {"off": 0.5}, "wrong": [], "skipped": "", "device": "cpu", "torch": "9.9"}
WRITES = """
import json, pathlib, sys
found = {found!r}
pathlib.Path(sys.argv[sys.argv.index("--write") + 1]).write_text(json.dumps(found))
{then}
"""


def made(folder: Path, name: str, source: str, *, seconds: float = 20) -> DayTest:
    """Return a test whose program is given."""
    path = folder / f"{name}.py"
    path.write_text(source)
    return DayTest(name=name, program=str(path), bound="off at most 1", seconds=seconds)


def writes(folder: Path, name: str, then: str = "", **found: Any) -> DayTest:
    """Return a test that says what it found, and does more after that."""
    return made(folder, name, WRITES.format(found={**FOUND, **found}, then=then))


def run(folder: Path, *tests: DayTest, seconds: float = 60) -> tuple[int, list[dict[str, Any]]]:
    """Run tests; return the exit code, and the lines that were written."""
    plan = Plan(tests=tests, device="cpu", tiny=True, out=folder, seconds=seconds, environ=dict(os.environ))
    code = run_all(plan, about=["On this machine."])
    return code, lines_of(folder)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of results.jsonl."""
    return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]


def test_what_all_tests_found_is_written_a_line_each(tmp_path: Path) -> None:
    """With the keys that are promised, and exit code 0; the summary has figures, bounds and versions."""
    code, lines = run(tmp_path, writes(tmp_path, "one"), writes(tmp_path, "two"))
    assert code == 0
    assert [list(line) for line in lines] == [KEYS, KEYS]
    assert [(line["test"], line["status"], line["figures"], line["torch"]) for line in lines] == [
        (name, "passed", {"off": 0.5}, "9.9") for name in ("one", "two")
    ]
    summary = (tmp_path / SUMMARY).read_text()
    assert "On this machine." in summary
    assert "2 passed." in summary
    assert "## two: passed\n\nBound: off at most 1.\n\n- off: 0.5\n" in summary


@pytest.mark.parametrize(
    ("then", "found", "status", "why"),
    [
        ("sys.exit(1)", {"wrong": ["it is off by 2"]}, "failed", "it is off by 2"),
        ("", {"wrong": ["it is off by 2"]}, "failed", "it is off by 2"),
        ("import os; print('last words', flush=True); os.abort()", {}, "failed", "last words"),
        ("", {"skipped": "there is no such thing"}, "skipped", "there is no such thing"),
        ("import time; print('begun', flush=True); time.sleep(100)", {}, "timed out", "begun"),
    ],
)
def test_a_test_that_fails_is_reported_and_the_others_still_run(
    then: str, found: dict[str, Any], status: str, why: str, tmp_path: Path
) -> None:
    """Bounds that were missed, what it printed last, or why it was skipped; the exit code is 1."""
    bad = writes(tmp_path, "bad", then, **found)
    seconds = 2 if status == "timed out" else 20
    bad = DayTest(name=bad.name, program=bad.program, bound=bad.bound, seconds=seconds)
    code, lines = run(tmp_path, bad, writes(tmp_path, "good"))
    assert code == 1
    assert [line["status"] for line in lines] == [status, "passed"]
    assert any(why in line for line in lines[0]["why"]), lines[0]


def test_a_test_does_without_what_it_names_of_the_environment(tmp_path: Path) -> None:
    """The others have it."""
    asks = "import os; sys.exit('LANG_OF_DAY' not in os.environ)"
    without = attrs.evolve(writes(tmp_path, "without", asks), without=("LANG_OF_DAY",))
    plan = Plan(
        tests=[writes(tmp_path, "with", asks), without],
        device="cpu",
        tiny=True,
        out=tmp_path,
        seconds=60,
        environ={**os.environ, "LANG_OF_DAY": "1"},
    )
    run_all(plan, about=[])
    assert [line["status"] for line in lines_of(tmp_path)] == ["passed", "failed"]


def test_one_that_cannot_even_begin_has_failed(tmp_path: Path) -> None:
    """What it printed, and its exit code, are what is known."""
    code, (line,) = run(tmp_path, made(tmp_path, "broken", "import no_such_module"))
    assert (code, line["status"]) == (1, "failed")
    assert "ModuleNotFoundError: No module named 'no_such_module'" in line["why"]
    assert "ended with code 1" in line["why"]


def test_all_that_one_printed_is_kept_where_it_does_not_pass(tmp_path: Path) -> None:
    """In one file, as much of each as may be: its end; nothing of one that has passed."""
    loud = f"print('first of all', 'x' * {MAX_LOG_BYTES}, sep=chr(10)); print('last of all', flush=True); sys.exit(1)"
    bad = writes(tmp_path, "bad", f"for n in range({2 * LINES}): print(f'line {{n}}')\nsys.exit(1)", wrong=["off"])
    run(tmp_path, bad, writes(tmp_path, "loud", loud, wrong=["off"]), writes(tmp_path, "good", "print('fine')"))
    logs = (tmp_path / LOGS).read_text()
    assert logs.startswith("======== bad: failed\nline 0\nline 1\n")
    assert logs.rstrip().endswith("last of all")
    assert "======== loud: failed\nx" in logs
    assert "fine" not in logs
    assert len(logs) < 1.1 * MAX_LOG_BYTES


def test_a_test_that_hangs_is_reported_with_its_stack(tmp_path: Path) -> None:
    """As what it has started is, and what these wrote into logs beside it."""
    (tmp_path / "child.py").write_text("import time\ndef waits_below():\n    time.sleep(100)\nwaits_below()\n")
    source = f"""
import pathlib, subprocess, sys, time
def waits_here():
    time.sleep(100)
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
(folder / "ranks.log").write_text("what ranks said\\n")
subprocess.Popen([sys.executable, {str(tmp_path / "child.py")!r}])
waits_here()
"""
    test = made(tmp_path, "hangs", source, seconds=3)
    environ = environ_of(tmp_path, tmp_path)
    run_all(Plan(tests=[test], device="cpu", tiny=True, out=tmp_path, seconds=60, environ=environ), about=[])
    (line,) = lines_of(tmp_path)
    assert line["status"] == "timed out"
    for words in ("in waits_here", "in waits_below", "what ranks said"):
        assert words in (tmp_path / LOGS).read_text()
        assert any(words in reason for reason in line["why"]), line["why"]


def test_nothing_is_run_where_the_command_cannot_be_imported(tmp_path: Path) -> None:
    """It is said once, with exit code 2."""
    (tmp_path / "attrs.py").write_text("raise ImportError('much too old')")
    words = ("gpu/day.py", "1", "--device", "cpu", "--tiny", "--out", str(tmp_path / "out"), "--carried", str(tmp_path))
    program = (
        "import os, sys, runpy; import attrs; os.environ['PYTHONPATH'] = sys.argv.pop(1); "
        "sys.path.insert(0, 'gpu'); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 2, said.stderr
    assert "day.py: expected that `mimo` can be imported, got:" in said.stderr
    assert said.stderr.rstrip().endswith("ImportError: much too old")


def test_what_a_test_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also where it ends well and leaves a process behind."""
    source = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    run(tmp_path, made(tmp_path, "parent", source))
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it still lives"


def test_what_no_time_was_left_for_is_written_as_not_run(tmp_path: Path) -> None:
    """A test that needs more than is left is not begun; the summary says so from the beginning."""
    slow = made(tmp_path, "slow", "import time; time.sleep(1)")
    code, lines = run(tmp_path, slow, writes(tmp_path, "second"), writes(tmp_path, "third"), seconds=15.5)
    assert code == 1
    assert [(line["test"], line["status"]) for line in lines[1:]] == [("second", "not run"), ("third", "not run")]
    assert "1 failed, 2 not run." in (tmp_path / SUMMARY).read_text()


def test_asked_to_end_it_writes_what_was_not_run(tmp_path: Path) -> None:
    """SIGTERM ends the test that runs; what there is then is complete."""
    out = tmp_path / "out"
    words = ("gpu/day.py", "1", "--device", "cpu", "--tiny", "--out", str(out), "--carried", str(tmp_path / "none"))
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (out / SUMMARY).exists():
        assert time.monotonic() < end
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert [line["test"] for line in lines_of(out)] == [test.name for test in SLICES["1"]]
    assert {line["status"] for line in lines_of(out)} == {"not run"}


def test_a_name_that_no_test_has_is_refused(tmp_path: Path) -> None:
    """With the names that there are."""
    words = ("gpu/day.py", "2", "--only", "9 ranks", "--out", str(tmp_path))
    said = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "day.py: no test '9 ranks' in this slice; there are: 2 ranks, 4 ranks" in said.stderr


def day(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run the program on the CPU, tiny, with what is installed; return the lines, all of which must have passed."""
    carried = folder / "carried"
    carried.mkdir()
    write_digits(carried / DIGITS)
    words = ("gpu/day.py", *words, "--device", "cpu", "--tiny", "--out", str(folder), "--carried", str(carried))
    said = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = lines_of(folder)
    assert said.returncode == 0, (said.stderr, [line["why"] for line in lines])
    return lines


@pytest.mark.soak
def test_day_counts_where_a_step_waits(tmp_path: Path) -> None:
    """Each place is a file and line of ours; one that the test itself makes is found."""
    (line,) = day(tmp_path, "1", "--only", "synchronisations")
    assert line["figures"]["counted"].startswith("a stand-in")
    places = line["figures"]["vit and decoder"]["places"]
    assert any(place.startswith("mimo/optimizer/runtime/_agreement.py:") for place in places), places


def test_day_runs_ranks_that_share_a_device(tmp_path: Path) -> None:
    """By `launch`, with a process group that stages what they send, in the bounds of the first law."""
    (line,) = day(tmp_path, "2", "--only", "2 ranks")
    (figures,) = line["figures"].values()
    assert 0 <= max(figures["loss"], figures["gradient"], figures["weight"]) <= 1
    assert figures["gradient"] > 0, "compared with itself"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", SLICES)
def test_day_passes_each_slice(number: str, tmp_path: Path) -> None:
    """All tests of a slice, tiny."""
    lines = day(tmp_path, number, "--minutes", "18")
    assert [line["test"] for line in lines] == [test.name for test in SLICES[number]]
