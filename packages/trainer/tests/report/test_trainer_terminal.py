"""Output of a run that nobody reads: what is written, and the console on a terminal that is closed."""

from __future__ import annotations

import os
from pathlib import Path

from mimo.testing import script, start

HEAD = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from mimo.launch.runtime import Terms, launch
from mimo.trainer.report.console import Progress, show_text

def together():
    total = torch.ones(())
    dist.all_reduce(total)
    return int(total)

def entry(process):
"""


def test_text_that_nobody_reads_on_ends_all_ranks_without_a_word(tmp_path: Path) -> None:
    """As other tools end after `| head`, while the others wait in a collective."""
    program = tmp_path / "program.py"
    program.write_text(
        HEAD
        + """
    together()
    if process.rank == 0:
        reads, writes = os.pipe()
        os.dup2(writes, 1)
        os.close(reads)
        show_text("a word")
    together()

if __name__ == "__main__":
    sys.exit(launch(entry, world=3))
"""
    )
    with start(str(program), call=script) as started:
        ended = started.wait()
    assert (ended.code, ended.out, ended.err) == (141, "", "")


def test_a_run_whose_terminal_is_closed_ends_by_itself(tmp_path: Path) -> None:
    """Though nothing that it prints can be written any more."""
    master, slave = os.openpty()
    written, program = tmp_path / "written", tmp_path / "program.py"
    program.write_text(
        HEAD
        + f"""
    console = Progress()
    together()
    while not process.heartbeat.stops:
        if process.rank == 0:
            console._line("a step")
        time.sleep(0.01)
    if process.rank == 0:
        console._line("saved")
        Path({str(written)!r}).write_text(str(together()))
    else:
        together()

if __name__ == "__main__":
    terminal = os.open({os.ttyname(slave)!r}, os.O_RDWR)  # that of this session from now on
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    sys.exit(launch(entry, world=2, terms=Terms(stops=True)))
"""
    )
    with os.fdopen(master, "rb", buffering=0) as screen, start(str(program), call=script) as started:
        shown = b""
        while b"a step" not in shown:
            shown += screen.read(1 << 10)
        os.close(slave)
        screen.close()
        assert started.wait().code == 0
    assert written.read_text() == "2"
