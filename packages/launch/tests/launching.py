"""Programs whose ranks the launcher starts, or which join as ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mimo.testing import Started, free_port, processes, script

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from mimo.hooks import ConfigError, DataError, UserError
from mimo.launch.faults import fault as _fault
from mimo.launch.runtime import Terms, Watchdog, launch

def together():
    found = torch.ones(())
    dist.all_reduce(found)
    return int(found)

def write_reason(fault):
    Path(DIRECTORY, "error.txt").write_text(f"{fault.shown}\\n")

def remove_reason():
    Path(DIRECTORY, "error.txt").unlink(missing_ok=True)

def say(*what):
    sys.stdout.write(" ".join(map(str, what)) + "\\n")  # at once, also where Python writes unbuffered
    sys.stdout.flush()

def entry(process):
"""
"""Imports, and functions that the body of a rank may call."""
TAIL = """
if __name__ == "__main__":
    terms = Terms(on_failure=write_reason, on_start=remove_reason, timeout={timeout}, stops={stops})
    sys.exit(launch(entry, world={world}, method={method!r}, terms=terms))
"""
"""Launches it, and writes why it failed into a file of its directory."""
BLOCKED = """
    together()
    if process.rank:
        together()  # rank 0 never comes
    print("ready", flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def start(
    tmp_path: Path,
    body: str,
    environ: Mapping[str, str] | None = None,
    *,
    world: int = 3,
    method: str = "fork",
    timeout: float = 600,
    stops: bool = False,
    fresh: bool = False,
) -> Iterator[Started]:
    """Start a program that launches ``body`` in each rank, in a fresh interpreter if asked or if the ranks are."""
    program = tmp_path / "program.py"
    text = f"DIRECTORY = {str(tmp_path)!r}\n{HEAD}{body}"
    text += TAIL.format(world=world, method=method, timeout=timeout, stops=stops)
    if not program.exists() or program.read_text() != text:  # ranks that share it may read it now
        program.write_text(text)
    if fresh or method == "spawn":
        with processes.start(program=(sys.executable, program), environ=environ) as started:
            yield started
    else:
        with processes.start(call=partial(script, str(program)), environ=environ) as started:
            yield started


def finish(started: Started) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr, when every process that shares these has ended."""
    ended = started.wait()
    return ended.code, ended.out, ended.err


def launched(tmp_path: Path, body: str, **how: Any) -> tuple[int, str, str]:
    """Start a program, and return what `finish` does."""
    with start(tmp_path, body, **how) as started:
        return finish(started)


def join(tmp_path: Path, body: str, world: int, *, shared: bool = False, **how: Any) -> list[tuple[int, str, str]]:
    """Start each rank by itself, as torchrun and Slurm do, and return what `finish` does by rank."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            directory = tmp_path if shared else tmp_path / str(rank)
            directory.mkdir(exist_ok=True)
            environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(stack.enter_context(start(directory, body, environ, **how)))
        return [finish(one) for one in ranks]
