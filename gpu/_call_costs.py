"""What a padded call of attention costs in fp32, in pairs, as `mimo.model.attention.batches.CALL_COSTS` has it.

What `benchmarks/attention.py` fits on the CPU, with segments that are long enough for a GPU. Host and device are timed
together over calls in a row, as a call that the host is slow to send costs just as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import attrs
import torch
from _case import Case, Found, noting, run
from _rows import chat, images
from _turns_taken import in_a_row

from mimo.model.attention.batches import CALL_COSTS, CallCost
from mimo.model.runtime import Segments, attend

APART, ONE = CallCost(call=0, row=0, masked=1), CallCost(call=1e12, row=0, masked=1)
HEADS = ((8, 64), (16, 128))
ROUNDS, REPEATS, TINY_ROUNDS, TINY_REPEATS = 7, 5, 1, 1


@attrs.frozen(kw_only=True)
class Lengths:
    """Of segments: the longest, and how many of ``short`` rows are copied."""

    long: int
    short: int
    many: int


FULL, TINY = Lengths(long=8192, short=128, many=512), Lengths(long=48, short=4, many=3)


@attrs.frozen
class Timer:
    """Times forward and backward of attention with heads of a width."""

    case: Case
    heads: int
    width: int

    def __call__(self, lengths: Sequence[int], cost: CallCost = ONE, *, causal: bool = False) -> float:
        """Return the seconds over segments of these lengths, in the calls that cost least by ``cost``."""
        rounds, repeats = (TINY_ROUNDS, TINY_REPEATS) if self.case.tiny else (ROUNDS, REPEATS)
        return in_a_row(self.case, self._step(lengths, cost, causal=causal), rounds=rounds, repeats=repeats)

    def _step(self, lengths: Sequence[int], cost: CallCost, *, causal: bool) -> Callable[[], object]:
        segments = Segments.of(lengths, causal=causal, device=self.case.device)
        with patch.dict(CALL_COSTS, {self.case.kind: cost}):
            assert segments.padded.calls  # chosen now
        shape = sum(lengths), self.heads, self.width
        query, key, value = (torch.randn(shape, device=self.case.device, requires_grad=True) for _ in range(3))
        gradient = torch.randn(shape, device=self.case.device)
        return lambda: torch.autograd.grad(attend(query, key, value, segments), (query, key, value), gradient)


def fitted(of: Timer, size: Lengths) -> tuple[float, CallCost]:
    """Return the seconds of a pair, and the costs as they are measured here."""
    long, short, many = size.long, size.short, size.many
    pair = (of([long]) - of([long // 2])) / (long**2 - (long // 2) ** 2)
    single = of([1])
    copied = of([short] * many + [1], APART) - of([short] * many) - single
    masked = (of([long, long - 4]) - of([long - 1, long - 3], APART)) / pair / (long**2 + (long - 4) ** 2) + 1
    return pair, CallCost(
        call=round(single / pair), row=round(copied / pair / (2 * (short * many + 1)), 1), masked=round(masked, 2)
    )


def beside(of: Timer, measured: CallCost, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Return the seconds of ragged segments by the table as it is, by what was measured, in one call, and apart."""
    rows: dict[str, tuple[list[int], bool]] = {
        "chat": (chat(64, 4) if tiny else chat(8192, 23), True),
        "images": (images(3, most=3) if tiny else images(64), False),
    }
    costs = {"as the table is": CALL_COSTS[of.case.kind], "as measured": measured, "one call": ONE, "apart": APART}
    return {
        name: {how: of(lengths, cost, causal=causal) for how, cost in costs.items()}
        for name, (lengths, causal) in rows.items()
    }


def test(case: Case) -> Found:
    """Measure for heads of two widths."""
    figures: dict[str, Any] = {"the table has": attrs.asdict(CALL_COSTS[case.kind])}
    wrong: list[str] = []
    for heads, width in HEADS[:1] if case.tiny else HEADS:
        what, of = f"{heads} heads of width {width}", Timer(case, heads, width)
        with noting(what, wrong):
            pair, measured = fitted(of, TINY if case.tiny else FULL)
            figures[f"{what}, measured"] = {"seconds of a pair": pair, **attrs.asdict(measured)}
            figures[f"{what}, seconds"] = beside(of, measured, tiny=case.tiny)
            if case.is_cuda and not (pair > 0 and measured.call > 0 and measured.row > 0):
                wrong.append(f"{what}: expected costs above 0, got {figures[f'{what}, measured']}")
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
