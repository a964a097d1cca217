"""Processes that read blocks beside each other: forked, so that nothing is sent to them; what they find lies in files.

Each has every n-th of the blocks that are missing, and reports those that it has written through a pipe, a line of JSON
each. It ends when nobody reads the pipe any more, as where the command was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import mimo.hooks
from mimo.hooks import RunError, UserError
from mimo.trainer.commands.indexing.blocks import Blocks, unwritable

_ERROR = "error-{}.json"
"""What ended a process, in the folder of blocks: it may be longer than what a pipe takes at once."""


def make_blocks(
    blocks: Blocks, missing: Sequence[int], *, jobs: int, closed: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """Yield each block that is written, and how many of its samples are broken, in the order in which they are done.

    Args:
        blocks: of a dataset.
        missing: numbers of those to write.
        jobs: processes at once.
        closed: descriptors that these close.

    Raises:
        UserError: as from `Blocks.make`, or a process was ended from outside.
        OSError: a process can't be started.
    """
    reads, writes = os.pipe()
    children = []
    try:
        for number in range(min(jobs, len(missing))):
            work = partial(_work, blocks, missing[number::jobs], (*closed, reads), writes)
            children.append(_fork(work))
        os.close(writes)
        writes = -1
        done = 0
        with os.fdopen(reads, "rb") as lines:
            reads = -1
            for line in lines:
                report = json.loads(line)
                if "error" in report:
                    raise _raised(blocks.folder / report["error"])
                done += 1
                yield report["block"], report["broken"]
        if done < len(missing):
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            children = []
            raise RunError(
                "mimo data index",
                expected="processes that read all blocks",
                got=f"one that ended with {min(codes)}" + (f" ({_signal(min(codes))})" if min(codes) < 0 else ""),
                fix="Start the command again: it resumes. With --jobs 1 it takes the least memory.",
            )
    finally:
        for descriptor in (reads, writes):
            if descriptor >= 0:
                os.close(descriptor)
        for child in children:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def _fork(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _run(work)
    return child


def _run(work: Callable[[], None]) -> NoReturn:
    """Do a forked process's work and end it: nothing of what its parent has begun is finished twice."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        code = 0
    except BrokenPipeError:  # the command was killed
        pass
    finally:
        os._exit(code)


def _work(blocks: Blocks, share: Sequence[int], closed: Sequence[int], writes: int) -> None:
    for descriptor in closed:
        os.close(descriptor)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many processes as cores
    parent = os.getppid()
    try:
        for block in share:
            if os.getppid() != parent:
                return
            _report(writes, {"block": block, "broken": blocks.make(block)})
    except BrokenPipeError:
        raise
    except UserError as error:
        parts = {name: getattr(error, name) for name in ("where", "expected", "got", "fix")}
        _report_error(blocks.folder, writes, {"kind": type(error).__name__, **parts})
    except OSError as error:  # its own files; what can't be read of data is a sample that is broken
        refusal = unwritable(blocks.origin, error)
        parts = {name: getattr(refusal, name) for name in ("where", "expected", "got", "fix")}
        _report_error(blocks.folder, writes, {"kind": "ConfigError", **parts})
    except Exception:  # noqa: BLE001 -- a bug of a plugin, which the parent shows
        parts = {"where": "mimo data index", "expected": "plugins that read samples", "got": traceback.format_exc()}
        _report_error(blocks.folder, writes, {"kind": "RunError", **parts, "fix": ""})


def _report_error(folder: Path, writes: int, error: Mapping[str, str]) -> None:
    path = folder / _ERROR.format(os.getpid())
    path.write_text(json.dumps(error), encoding="utf-8")
    _report(writes, {"error": path.name})


def _report(writes: int, report: object) -> None:
    """Write a line, of no more bytes than a pipe takes at once."""
    os.write(writes, json.dumps(report).encode() + b"\n")


def _raised(path: Path) -> UserError:
    error = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    kind: type[UserError] = getattr(mimo.hooks, error["kind"], RunError)
    return kind(error["where"], expected=error["expected"], got=error["got"], fix=error["fix"])


def _signal(code: int) -> str:
    return signal.Signals(-code).name
