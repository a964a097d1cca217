"""Time of a model's parts in our form beside another form of the same computation, in one process.

*Mamba-2*: forward and backward of the scan by chunks beside the recurrence row by row, on two packed samples. Both of a
pair take turns in one run. ``nox -s bench -- model [--rounds N] [--threads N]`` prints a table, and as its last line
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from mimo.model.runtime import SampleChunks, scan, scan_by_row

HEADS, WIDTH, GROUPS, STATE = 8, 64, 1, 64
CHUNK = 64


@attrs.frozen(kw_only=True)
class Pair:
    """Two ways to compute the same: ``ours`` over ``other`` is the ratio."""

    ours: Callable[[], object]
    other: Callable[[], object]
    aim: tuple[str, float] | None = None


def scans(rows: int) -> Pair:
    """Return both forms of a Mamba-2 scan over so many rows, with their backward."""
    generator = torch.Generator().manual_seed(0)
    x, b, c = (
        torch.randn(rows, *shape, generator=generator) for shape in ((HEADS, WIDTH), (GROUPS, STATE), (GROUPS, STATE))
    )
    steps = torch.rand(rows, HEADS, generator=generator) * 0.1
    rates, skip = -torch.arange(1.0, HEADS + 1), torch.ones(HEADS)
    given = [value.requires_grad_() for value in (x, steps, rates, b, c, skip)]
    chunks = SampleChunks.of((rows // 3, rows - rows // 3), chunk=CHUNK)

    def run(form: Callable[..., Tensor]) -> None:
        torch.autograd.grad(form(*given, chunks).sum(), given)

    return Pair(ours=lambda: run(scan), other=lambda: run(scan_by_row), aim=("<=", 0.2))


def pairs() -> Mapping[str, Pair]:
    """Return all that is compared, by what the ratio is of."""
    return {f"Mamba-2, {rows} rows, chunks / row by row": scans(rows) for rows in (256, 2048)}


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, of which the median counts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios, spread, aims = {}, {}, {}
    for what, pair in pairs().items():
        for way in (pair.ours, pair.other):
            way()
        turns = [(seconds(pair.ours), seconds(pair.other)) for _ in range(options.rounds)]
        found = [ours / other for ours, other in turns]
        ours, other = (statistics.median(column) for column in zip(*turns, strict=True))
        ratios[what], spread[what] = statistics.median(found), [min(found), max(found)]
        if pair.aim is not None:
            aims[what] = pair.aim
        print(f"{what}: {ours * 1e3:.1f} ms / {other * 1e3:.1f} ms = {ratios[what]:.3f}", flush=True)
    print(json.dumps({"bench": "model", "ratios": ratios, "aims": aims, "runs": options.rounds, "spread": spread}))


if __name__ == "__main__":
    main()
