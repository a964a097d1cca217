"""Programs in processes of their own: what they print and how they end, and that nothing of them is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mimo.testing import Started, free_port, made_once, start

PROGRAM = """
import os, sys
print(os.getcwd(), *sys.argv[1:], os.environ["WHO"], flush=True)
print("no", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("forked", [True, False])
def test_a_program_has_words_folder_environment_streams_and_code(tmp_path: Path, forked: bool) -> None:
    """Whether it is forked or executed."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    program = () if forked else (sys.executable,)
    with start(path, "a", "b", program=program, cwd=tmp_path, environ={"WHO": "me"}) as started:
        ended = started.wait()
    words = [str(path), "a", "b"] if forked else ["a", "b"]
    assert (ended.code, ended.out.split(), ended.err) == (3, [str(tmp_path), *words, "me"], "no\n")


def test_a_program_finds_imported_what_this_process_can_import(tmp_path: Path) -> None:
    """From any folder of its path; of Python 3.11 the process that forks is given none."""
    (tmp_path / "early.py").write_text("")
    forking = tmp_path / "forking.py"
    forking.write_text(f"""
import sys
from mimo.testing import start

def say(*words):
    print("early" in sys.modules)

if __name__ == "__main__":
    sys.path.append({str(tmp_path)!r})
    with start(call=say, preload=["early"]) as started:
        print(started.wait().printed)
""")
    with start(forking, program=(sys.executable,)) as started:
        assert started.wait().printed.split() == ["True"]


def test_what_a_program_leaves_behind_is_an_error_and_ends(tmp_path: Path) -> None:
    """A child in a session of its own too."""
    path = tmp_path / "program.py"
    path.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '300'], stdout=-3, stderr=-3, start_new_session=True)\n"
    )

    def leave(started: Started) -> None:
        with pytest.raises(AssertionError, match="1 processes were left behind"):
            started.wait()
        assert started.living()

    with start(path, program=(sys.executable,)) as started:
        leave(started)
    while started.living():  # a killed process takes a moment to go
        pass


def test_a_line_is_waited_for(tmp_path: Path) -> None:
    """And whoever ends without it says what it printed instead."""
    path = tmp_path / "program.py"
    path.write_text("print('ready', flush=True)\ninput()\n")
    with start(path) as started:
        started.wait_for("ready")
    with start(path) as started, pytest.raises(AssertionError, match=r"ended without 'done': ready"):
        started.wait_for("done")


def test_a_file_is_made_once(tmp_path: Path) -> None:
    """Whoever comes later gets the same, and a maker that fails leaves none."""
    path = tmp_path / "numbers"
    with pytest.raises(OSError, match="no space"):
        made_once(path, fail)
    assert made_once(path, lambda part: part.write_text("first")).read_text() == "first"
    assert made_once(path, fail).read_text() == "first"


def fail(part: Path) -> None:
    """Write half of it."""
    part.write_text("fi")
    raise OSError("no space")


def test_ports_lie_below_those_that_systems_choose() -> None:
    """And nobody listens there yet."""
    assert 20_000 <= free_port() < 32_000


def test_a_program_obeys_signals_that_the_tests_ignore(tmp_path: Path) -> None:
    """As under nohup or behind a shell's &, which every process that is started from there would inherit."""
    child = tmp_path / "child.py"
    child.write_text(
        "from signal import SIG_DFL, SIGHUP, SIGINT, default_int_handler, getsignal\n"
        "print(getsignal(SIGHUP) == SIG_DFL and getsignal(SIGINT) == default_int_handler)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(
        "import signal\n"
        "from mimo.testing import start\n"
        "if __name__ == '__main__':\n"
        "    for number in (signal.SIGHUP, signal.SIGINT):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        f"    with start({str(child)!r}, preload=()) as started:\n"
        "        print(started.wait().printed, end='')\n"
    )
    with start(path, program=(sys.executable,)) as started:
        assert started.wait().printed == "True\n"
