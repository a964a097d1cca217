"""Layouts that nobody chose, beside the truth: ``nox -s oracle -- --random 20 --seed 1``."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from drawing import draw
from jobs import make_job, prepare
from oracle import Oracle
from tables import AXES_KEYS, Table
from test_oracle_lora import run_adapted, run_plainly

from mimo.hooks import ConfigError
from mimo.testing import Pool, RanksError
from mimo.trainer.runtime import check_patterns_of

BALANCES = ("cost", "count")
LINES = 10
"""So many lines are shown of what differs."""


def generator(seed: int, index: int) -> random.Random:
    """Return the generator of a layout, which depends on these two alone."""
    return random.Random(f"{seed} {index}")


def refusal(settings: Table) -> ConfigError | None:
    """Return why settings are refused, None where they are not: any other error is a fault."""
    try:
        check_patterns_of(make_job(settings))
    except ConfigError as error:
        return error
    return None


def describe(settings: Table) -> str:
    """Return settings in a line."""
    keys = ("ranks", *AXES_KEYS, "frozen", "lora", "distil", "optimizer")
    parts = []
    for module in settings["modules"].values():
        shown = {key: module[key] for key in keys if str(module.get(key, 1)) not in ("1", "False", "none")}
        parts.append(f"{module['plugin']}({', '.join(f'{key} {value}' for key, value in shown.items())})")
    language = settings["modules"]["language"]["config"]
    further = (
        "hidden_dropout",
        "embedding_dropout",
        "tied",
        "kv_heads",
        "experts",
        "pattern",
        "next_tokens",
        "next_tokens_pattern",
    )
    parts.append(", ".join(f"{key} {language[key]}" for key in further if language.get(key)))
    shown_of_run = ("micro_batch", "batch_tokens", "compile")
    sizes = [f"{key} {settings['run'][key]}" for key in shown_of_run if key in settings["run"]]
    parts.append(f"{' '.join(settings['schedule'].values())}, {', '.join(sizes)}")
    data = settings["data"]
    parts.append(
        f"seed {settings['run']['seed']}, pictures {data['pictures']}, weights {data['weights']}, "
        f"by {data['balance']}, "
        f"cut at {data['max_tokens']}"
    )
    optimizer = settings["optimizer"]
    parts.append(
        " ".join(
            f"{key} {optimizer[key]}" for key in ("plugin", "shard", "moments", "clip", "clip_by") if key in optimizer
        )
    )
    return "; ".join(filter(None, parts))


def assess(oracle: Oracle, settings: Table) -> tuple[Table, str]:
    """Return what `Oracle.assess` does, or how ranks failed."""
    try:
        return oracle.assess(settings)
    except RanksError as error:
        return settings, "\n".join(str(error).splitlines()[-LINES:])


def check(seed: int, indices: Iterable[int]) -> int:
    """Check layouts, each by cost and by count, and print them; return 1 if one differs, or if most are refused."""
    shown: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with Pool(prepare) as pool, TemporaryDirectory() as folder:
        # What LoRA adds begins with numbers: at zero, half of its gradients would be.
        oracle = Oracle(pool, Path(folder), plain=run_plainly, layout=run_adapted)
        for index in indices:
            settings = draw(generator(seed, index))
            if (why := refusal(settings)) is not None:
                refused[why.where] += 1
                print(f"none {index}: {why}", flush=True)
                continue
            failed = False
            for balance in BALANCES:
                settings = {**settings, "data": {**settings["data"], "balance": balance}}
                settings, wrong = assess(oracle, settings)
                print(f"{'FAIL' if wrong else 'ok  '} {index}: {describe(settings)}", flush=True)
                for line in wrong.splitlines()[:LINES]:
                    print(f"     {line}")
                failed |= bool(wrong)
            shown["failed" if failed else "passed"] += 1
    print(f"{shown['passed']} passed, {shown['failed']} failed, {refused.total()} refused by their settings")
    for where, count in refused.most_common():
        print(f"  {count} by {where}")
    return int(shown["failed"] > 0 or refused.total() > shown.total())


def main() -> int:
    """Check random layouts; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Compare layouts that nobody chose with one plain process.")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="how many layouts")
    parser.add_argument("--seed", type=int, default=0, help="layout k depends on seed and k alone")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the layout to begin with")
    options = parser.parse_args()
    return check(options.seed, range(options.first, options.first + options.random))


if __name__ == "__main__":
    sys.exit(main())
