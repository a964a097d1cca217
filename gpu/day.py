"""What one GPU can prove, in ten minutes a command: ``python gpu/day.py 1 --out FOLDER``.

A plain program: it needs Python 3.12, torch with CUDA, attrs, pluggy, pytest, rich, safetensors and transformers, and
what `carry.py` has put into ``gpu/carried``; no network. Each test is a process with a limit. ``results.jsonl`` gets a
line a test, ``summary.md`` is written anew after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import attrs
from _carried import ABOUT, DIGITS, FOLDER, unpack, versions
from _results import Result, append, keep_log, summarise
from _slices import SLICES, DayTest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LINES = 40
"""So many of the last lines of what a failed test printed are kept."""
_NAMES = ("torch", "numpy", "safetensors", "transformers", "mimo-trainer")
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_SECONDS = 15.0
"""Of the whole time, kept for what has to be written at the end."""
_DUMP_SECONDS = 3.0
"""In which the processes of a test that has come to its limit print their stacks."""


@attrs.frozen(kw_only=True)
class Plan:
    """What is run.

    Args:
        tests: in their order.
        device: ``cpu`` or ``cuda``.
        tiny: as little of each as shows that it works.
        out: where results lie.
        seconds: for all tests together.
        environ: of their processes.
    """

    tests: Sequence[DayTest]
    device: str
    tiny: bool
    out: Path
    seconds: float
    environ: Mapping[str, str]


class _Stopped(Exception):  # noqa: N818  # no error: somebody asked for it
    """SIGTERM or Ctrl-C."""


def run_one(test: DayTest, plan: Plan, *, seconds: float) -> Result:
    """Run a test in a process group of its own, which is gone when this returns."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mimo-day-") as scratch:
        written, log = Path(scratch) / "found.json", Path(scratch) / "log.txt"
        words = [sys.executable, str(HERE / test.program), "--device", plan.device, "--folder", scratch]
        words += ["--write", str(written), *(["--tiny"] if plan.tiny else []), *test.words]
        environ = {name: value for name, value in plan.environ.items() if name not in test.without}
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603  # our own program
                words, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(seconds)
                ended = True
            except subprocess.TimeoutExpired:
                ended = False
                _dump(process)
            finally:
                with contextlib.suppress(ProcessLookupError):  # whatever it has started is of its group too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # it has not come to writing
            found = json.loads(written.read_text(encoding="utf-8"))
        logs = [log] if ended else [log, *sorted(Path(scratch).glob("*.log"))]  # of what it would have printed itself
        said = "".join(each.read_text(encoding="utf-8", errors="replace") for each in logs)
    took = time.monotonic() - begun
    result = _judged(test, found, said.splitlines()[-LINES:], code=process.returncode, ended=ended, took=took)
    if result.status in {"failed", "timed out"}:
        keep_log(plan.out, result, said)
    return result


def _dump(process: subprocess.Popen[bytes]) -> None:
    """Have the processes of a test print the stack of each of their threads, one after another.

    All are stopped first, so that two don't write into one line, and none ends the others when it sees one gone. The
    youngest is first: a rank that dies with its launcher has printed by then.
    """
    end = time.monotonic() + _DUMP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGSTOP)
    for pid in sorted(_members(process.pid), reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
        while time.monotonic() < end and pid in _members(process.pid):
            time.sleep(0.01)


def _members(group: int) -> set[int]:
    """Return the processes of a process group that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            pid, _, rest = stat.read_text(errors="replace").partition(" ")
            state, _parent, its_group = rest.rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.add(int(pid))
    return found


def _judged(
    test: DayTest, found: Mapping[str, Any], printed: Sequence[str], *, code: int, ended: bool, took: float
) -> Result:
    result = Result(
        test=test.name,
        status="passed",
        figures=found.get("figures", {}),
        bound=test.bound,
        seconds=round(took, 2),
        device=found.get("device", ""),
        torch=found.get("torch", ""),
    )
    if not ended:
        return attrs.evolve(result, status="timed out", why=[f"no end after {took:.0f} s", *printed])
    if code == 0 and found and not found["wrong"]:
        skipped = found["skipped"]
        return attrs.evolve(result, status="skipped", why=[skipped]) if skipped else result
    wrong = found.get("wrong", [])
    return attrs.evolve(
        result, status="failed", why=[*wrong, *printed, *([] if found else [f"ended with code {code}"])]
    )


def run_all(plan: Plan, *, about: Sequence[str]) -> int:
    """Run all tests as far as time allows; return 0 if all have passed, 1 otherwise."""
    end = time.monotonic() + plan.seconds
    done: dict[str, Result] = {}

    def show() -> None:
        rest = (Result(test=test.name, status="not run", bound=test.bound) for test in plan.tests)
        summarise(plan.out, [done.get(each.test, each) for each in rest], about=about)

    with contextlib.suppress(_Stopped), _stoppable():
        show()
        for test in plan.tests:
            left = end - time.monotonic()
            if left < min(test.seconds, _GRACE_SECONDS):
                break
            result = run_one(test, plan, seconds=min(test.seconds, left))
            done[test.name] = result
            append(plan.out, result)
            print(f"{result.status:9}  {result.seconds:6.1f} s  {result.test}", *result.why[:3], sep="  ", flush=True)
            show()
    for test in plan.tests:
        if test.name not in done:
            done[test.name] = Result(
                test=test.name, status="not run", bound=test.bound, why=["no time was left for it"]
            )
            append(plan.out, done[test.name])
            print(f"not run    {'':8}  {test.name}", flush=True)
    show()
    return int(any(result.status != "passed" for result in done.values()))


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Leave by `_Stopped` when somebody asks this process to end."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environ_of(site: Path, digits: Path) -> dict[str, str]:
    """Return the environment of tests: what is carried comes first, and products of float32 are not rounded to TF32.

    The test of TF32 itself does without that.
    """
    found = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    tests = [str(folder) for folder in sorted((ROOT / "integration_tests").glob("*/"))]
    paths = [str(site), str(HERE), *tests, *filter(None, [found.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",  # many ranks share the cores
        **found,
        "PYTHONPATH": os.pathsep.join(paths),
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONFAULTHANDLER": "1",  # a process that aborts prints its stack
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that who looks for a GPU can fork afterwards
        "MIMO_DAY_DIGITS": str(digits),
        "COLUMNS": "160",
    }


def check_imports(environ: Mapping[str, str]) -> str:
    """Return why tests could not even import the command, empty if they can."""
    words = [sys.executable, "-c", "import mimo.trainer.commands.main"]
    said = subprocess.run(words, cwd=ROOT, env=dict(environ), capture_output=True, text=True, check=False)  # noqa: S603  # our own program
    return "" if said.returncode == 0 else said.stderr.strip() or f"it ended with code {said.returncode}"


def chosen(names: Sequence[str], tests: Sequence[DayTest]) -> Sequence[DayTest]:
    """Return the tests of these names, all for none.

    Raises:
        SystemExit: there is none of a name.
    """
    known = {test.name: test for test in tests}
    unknown = [name for name in names if name not in known]
    if unknown:
        msg = f"day.py: no test {unknown[0]!r} in this slice; there are: {', '.join(known)}"
        raise SystemExit(msg)
    return [known[name] for name in names] or tests


def main(words: Sequence[str] | None = None) -> int:
    """Run a slice."""
    parser = argparse.ArgumentParser(description="Prove on one GPU what one GPU can prove.")
    parser.add_argument("slice", choices=tuple(SLICES))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of results.jsonl and summary.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="as little of each test as shows that it works")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all tests; what is left over is not run")
    parser.add_argument("--only", action="append", default=[], metavar="TEST", help="may be given several times")
    parser.add_argument("--carried", type=Path, default=HERE / FOLDER, metavar="FOLDER", help="what carry.py has made")
    given = parser.parse_args(words)
    tests = chosen(given.only, SLICES[given.slice])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mimo-day-site-") as folder:
        site = Path(folder) / "site"
        names = unpack(given.carried, site)
        sys.path.insert(0, str(site))
        what = f"Slice {given.slice} on {given.device}{', tiny' if given.tiny else ''}"
        about = [
            f"{what}: {platform.node()}, Python {platform.python_version()}, {', '.join(versions(_NAMES))}.",
            f"Unpacked: {', '.join(names)}." if names else "Nothing was carried: what is installed here was tested.",
        ]
        with contextlib.suppress(OSError, ValueError):
            about.append(f"Carried: {json.loads((given.carried / ABOUT).read_text(encoding='utf-8'))['source']}.")
        plan = Plan(
            tests=tests,
            device=given.device,
            tiny=given.tiny,
            out=given.out.resolve(),
            seconds=60 * given.minutes - _GRACE_SECONDS,
            environ=environ_of(site, (given.carried / DIGITS).resolve()),
        )
        missing = check_imports(plan.environ)
        if missing:
            print(f"day.py: expected that `mimo` can be imported, got:\n{missing}", file=sys.stderr)
            return 2
        return run_all(plan, about=about)


if __name__ == "__main__":
    sys.exit(main())
