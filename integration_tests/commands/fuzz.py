"""Settings that nobody chose through `mimo check`: ``nox -s fuzz -- --count 1000 --seed 1``.

Each is refused by a setting's path within the bounds of docs/limits.md, or accepted.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w
from fuzzing import Case, Checked, bases, check_forked, draw, faults
from tables import Table

from mimo.trainer.commands.main import run


def check_sound(folder: Path, tables: Mapping[str, Table]) -> Mapping[str, Checked]:
    """Check the sound settings, which must be accepted, and return what that took.

    Each is checked here first, so that this process has imported whatever a check of them needs: in its forks a check
    costs what its settings cost.
    """
    found = {}
    for name, table in tables.items():
        case = Case(base=name, text=tomli_w.dumps(table))
        (folder / "sound.toml").write_text(case.text)
        with redirect_stdout(StringIO()), chdir(folder):
            assert run(["check", "sound.toml"]) == 0, name
        found[name] = check_forked(case, folder)
        assert (found[name].code, found[name].err) == (0, ""), (name, found[name].err)
    return found


def fuzz(seed: int, indices: Iterable[int], *, only: Sequence[str] = ()) -> int:
    """Check settings and report those that are mistreated; return how many these are.

    Args:
        seed: settings depend on it and their index alone.
        indices: which.
        only: names of the sound settings to begin with; empty for all.
    """
    counts: Counter[str] = Counter()
    slowest = largest = 0.0
    tables = {name: table for name, table in bases().items() if not only or name in only}
    with TemporaryDirectory() as name:
        folder = Path(name)
        sound = check_sound(folder, tables)
        for index in indices:
            case = draw(random.Random(f"{seed} {index}"), tables)
            found = check_forked(case, folder)
            counts["accepted" if found.code == 0 else "refused"] += 1
            if found.code:
                slowest = max(slowest, found.seconds - sound[case.base].seconds)
                largest = max(largest, (found.peak - sound[case.base].peak) / 2**20)
            for fault in faults(case, found, sound[case.base]):
                counts["faults"] += 1
                print(f"FAIL {index} ({case.base}: {'; '.join(case.changes)}): {fault}", flush=True)
    print(f"seed {seed}: {counts['refused']} refused, {counts['accepted']} accepted, {counts['faults']} faults")
    print(f"beyond a sound check a refusal took at most {slowest:.2f} CPU seconds and {largest:.0f} MiB")
    return counts["faults"]


def main() -> int:
    """Check random settings; return 1 if some are mistreated."""
    parser = argparse.ArgumentParser(description="Check settings that are wrong in ways nobody chose.")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="settings k depend on seed and k alone")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the settings to begin with")
    options = parser.parse_args()
    return int(fuzz(options.seed, range(options.first, options.first + options.count)) > 0)


if __name__ == "__main__":
    sys.exit(main())
