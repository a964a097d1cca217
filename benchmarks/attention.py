"""What a kernel call of attention costs on the CPU, and ragged segments in the calls that are chosen, beside others.

Costs are fitted to forward and backward of calls of several sizes and given in pairs of a query and a key, as
`mimo.model.attention.batches.CALL_COSTS` holds them. Segments attend in *ours*, in calls of one length each (*apart*),
and padded in one call (*one*); all take turns in one run, one thread.
``nox -s bench -- attention [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from mimo.model.attention.batches import CALL_COSTS, CallCost
from mimo.model.runtime import Segments, attend

HEADS, WIDTH = 8, 64
WAYS = {
    "ours": CALL_COSTS["cpu"],
    "apart": CallCost(call=0, row=0, masked=1),
    "one": CallCost(call=1e12, row=0, masked=1),
}


def _cases() -> dict[str, tuple[list[int], bool]]:
    """Return lengths, and whether attention is causal."""
    draw = random.Random(7)
    chat = [draw.lognormvariate(0, 0.8) for _ in range(23)]
    return {
        "23 chat samples in 8,192 rows": ([round(8_192 * share / sum(chat)) for share in chat], True),
        "64 images of free size": ([draw.randint(8, 24) * draw.randint(8, 24) for _ in range(64)], False),
        "200 short texts": ([draw.randint(3, 60) for _ in range(200)], True),
    }


def _seconds(step: Callable[[], object], *, least: int = 3) -> float:
    """Return the CPU seconds of the quickest of several runs."""
    found = []
    for _ in range(least):
        start = time.process_time()
        step()
        found.append(time.process_time() - start)
    return min(found)


def _step(lengths: list[int], *, causal: bool, cost: CallCost) -> Callable[[], object]:
    """Return forward and backward of attention over segments of these lengths."""
    segments = Segments.of(lengths, causal=causal)
    with patch.dict(CALL_COSTS, cpu=cost):
        _ = segments.padded  # chosen now
    rows = sum(lengths)
    query, key, value = (torch.randn(rows, HEADS, WIDTH, requires_grad=True) for _ in range(3))
    gradient = torch.randn(rows, HEADS, WIDTH)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(query, key, value, segments), (query, key, value), gradient)

    return run


def fitted() -> dict[str, float]:
    """Return the fields of `CallCost` as they are measured here."""

    def of(lengths: list[int], *, cost: CallCost = WAYS["one"], causal: bool = False) -> float:
        return _seconds(_step(lengths, causal=causal, cost=cost), least=15)

    pair = (of([384]) - of([192])) / (384**2 - 192**2)
    single = of([1])
    call = single / pair
    copied = of([32] * 64 + [1], cost=WAYS["apart"]) - of([32] * 64) - single
    row = copied / pair / (2 * (32 * 64 + 1))
    masked = (of([384, 380]) - of([383, 381], cost=WAYS["apart"])) / pair / (384**2 + 380**2) + 1
    return {"call": round(call), "row": round(row, 1), "masked": round(masked, 2)}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    costs = [fitted() for _ in range(rounds)]
    figures: dict[str, object] = {
        f"{name}, in pairs": statistics.median(cost[name] for cost in costs) for name in costs[0]
    }
    for case, (lengths, causal) in _cases().items():
        steps = {way: _step(lengths, causal=causal, cost=cost) for way, cost in WAYS.items()}
        for device in CALL_COSTS:
            with patch.dict(CALL_COSTS, cpu=CALL_COSTS[device]):
                calls = Segments.of(lengths, causal=causal).padded.calls
            area = sum(call.chunks * call.queries * call.keys for call in calls)
            figures[f"{case}: calls, {device}"] = len(calls)
            figures[f"{case}: area, {device}"] = round(area / sum(length**2 for length in lengths), 3)
            print(f"{case}: {len(calls)} calls on {device}, area {figures[f'{case}: area, {device}']}")
        times: dict[str, list[float]] = {way: [] for way in steps}
        for _ in range(rounds):
            for way, step in steps.items():
                times[way].append(_seconds(step))
        for way in ("apart", "one"):
            ratios = [mine / other for mine, other in zip(times["ours"], times[way], strict=True)]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            figures[f"{case}: ours over {way}"] = round(middle, 3)
            print(f"{case}: ours over {way} {middle:.2f} ({low:.2f} to {high:.2f})")
    print(json.dumps({"benchmark": "attention", "rounds": rounds, **figures}, ensure_ascii=False))


if __name__ == "__main__":
    main()
