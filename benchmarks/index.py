"""An indexed jsonl file: seconds from opening it to the layouts of its first batch, and memory of the process for it.

A file of short lines is generated and its offsets are written as `mimo data index` does; a fresh process then
opens it. Memory is what is neither imported nor mapped from files. ``python benchmarks/index.py [--lines N]`` prints a
line, and as its last one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mimo.data import DATASETS, TOKENIZERS, lay_out
from mimo.data.sources.jsonl import JsonlConfig, index_jsonl
from mimo.hooks import discover

BATCH = 64
AIMS = {"seconds": 2.0, "megabytes": 100.0}
_AT_ONCE = 100_000


def main() -> None:
    """Print what is measured."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--lines", type=int, default=10_000_000)
    arguments.add_argument("--open", type=Path, help="open this file and print what it takes; used by itself")
    given = arguments.parse_args()
    if given.open is not None:
        print(json.dumps(measure(given.open)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        generate(path, given.lines)
        begin = time.perf_counter()
        index_jsonl(JsonlConfig(path=str(path)), "train")
        indexing = time.perf_counter() - begin
        found = {}
        for name in ("indexed", "scanned"):
            words = [sys.executable, __file__, "--open", str(path)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)  # noqa: S603  # this file
            found[name] = json.loads(done.stdout)
            path.with_name("train.jsonl.lines").unlink(missing_ok=True)
    for name, one in found.items():
        print(f"{given.lines:,} lines, {name}: {one['seconds']:.3f} s, {one['megabytes']:.1f} MB")
    print(json.dumps({"bench": "index", "lines": given.lines, "write_seconds": indexing, **found, "aims": AIMS}))


def generate(path: Path, lines: int) -> None:
    """Write short texts of several lengths."""
    with path.open("w") as file:
        for begin in range(0, lines, _AT_ONCE):
            numbers = range(begin, min(begin + _AT_ONCE, lines))
            file.write("".join(f'{{"text": "{"word " * (number % 7 + 1)}{number}"}}\n' for number in numbers))


def measure(path: Path) -> dict[str, float]:
    """Return what it takes this process to open a file and to lay out a batch spread over it."""
    jsonl = discover(DATASETS).find("jsonl", where="data.plugin")
    byte = discover(TOKENIZERS).find("byte", where="tokenizer.plugin")
    tokenizer = byte.build(byte.config(), [])
    before = memory()
    begin = time.perf_counter()
    dataset = jsonl.open(jsonl.config(path=str(path)), tokenizer, "train")
    assert dataset is not None
    for sample in np.linspace(0, len(dataset) - 1, BATCH, dtype=np.int64).tolist():
        lay_out(dataset, sample, tokenizer=tokenizer, rows={}, max_tokens=64)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "megabytes": memory() - before}


def memory() -> float:
    """Return the megabytes of this process that are of no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
