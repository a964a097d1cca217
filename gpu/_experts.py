"""Products of rows with their experts' weights: beside a loop in float64, and how fast beside one dense product.

Shapes: R rows sorted by expert, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from _case import Case, Found, noting, run
from _rows import shares_of
from _turns_taken import Way, medians, ratio, take_turns
from torch import Tensor
from torch.nn import functional

from mimo.model.layers.grouped_linear import GroupedLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDS, TINY_ROUNDS = 15, 2
SHARE = 0.6
"""Of a dense product's rate, at least."""


@attrs.frozen(kw_only=True)
class Size:
    """Of a layer: R, E, I, O."""

    rows: int
    experts: int
    inputs: int
    outputs: int


EXACT, FAST = (
    Size(rows=3000, experts=16, inputs=512, outputs=256),
    Size(rows=32768, experts=32, inputs=2048, outputs=1408),
)
TINY = Size(rows=60, experts=4, inputs=16, outputs=24)


def loads(size: Size) -> Mapping[str, Sequence[int]]:
    """Return how many rows each expert has; of ragged loads the second has none, and the first the most."""
    even = [size.rows // size.experts + (index < size.rows % size.experts) for index in range(size.experts)]
    draw = random.Random(5)
    weights = [draw.lognormvariate(0, 1) for _ in even]
    weights[0], weights[1] = 2 * max(weights), 0.0
    ragged = [int(size.rows * weight / sum(weights)) for weight in weights]
    ragged[0] += size.rows - sum(ragged)
    return {"even": even, "ragged": ragged}


def compare(case: Case, size: Size, dtype: torch.dtype, counts: Sequence[int]) -> dict[str, float]:
    """Return shares of what may be off, see `shares_of`."""
    draw = torch.Generator().manual_seed(4)
    layer = GroupedLinear(size.experts, size.inputs, size.outputs).to(case.device, dtype)
    x, gradient = (
        torch.randn(size.rows, width, generator=draw).to(case.device, dtype) for width in (size.inputs, size.outputs)
    )
    x.requires_grad_()
    found = layer(x, counts)
    of_x, of_weight = torch.autograd.grad(found, (x, layer.weight), gradient)
    exact, weight = (each.detach().double().requires_grad_() for each in (x, layer.weight))
    parts = zip(exact.split(list(counts)), weight.unbind(0), strict=True)
    truth = torch.cat([part @ each.t() for part, each in parts])
    wanted = torch.autograd.grad(truth, (exact, weight), gradient.double())
    return shares_of(dtype, (found, truth), {"rows": (of_x, wanted[0]), "weights": (of_weight, wanted[1])})


def ways(case: Case, size: Size, counts: Sequence[int]) -> Mapping[str, Way]:
    """Return the layer, and a dense product of as many multiplications, in bf16."""
    layer = GroupedLinear(size.experts, size.inputs, size.outputs).to(case.device, torch.bfloat16)
    dense = layer.weight[0].detach().clone().requires_grad_()
    x = torch.randn(size.rows, size.inputs, device=case.device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(size.rows, size.outputs, device=case.device, dtype=torch.bfloat16)

    def way(forward: Callable[[], Tensor], weight: Tensor) -> Way:
        def run_forward() -> Callable[[], object]:
            found = forward()
            return lambda: torch.autograd.grad(found, (x, weight), gradient)

        return run_forward

    return {
        "grouped": way(lambda: layer(x, counts), layer.weight),
        "dense": way(lambda: functional.linear(x, dense), dense),
    }


def test(case: Case) -> Found:
    """Compare, and time."""
    figures: dict[str, Any] = {"off by, at most": 1, "share of the dense rate, at least": SHARE}
    if not case.is_cuda:
        figures["left out"] = "no rate is judged"
    wrong: list[str] = []
    for name, counts in loads(TINY if case.tiny else EXACT).items():
        for dtype in DTYPES:
            what = f"{str(dtype).removeprefix('torch.')}, {name} loads"
            with noting(what, wrong):
                shares = compare(case, TINY if case.tiny else EXACT, dtype, counts)
                figures[f"{what}, off by"] = shares
                wrong += [
                    f"{what}: {part} is off by {share:g} times what is allowed"
                    for part, share in shares.items()
                    if not share <= 1
                ]
    size = TINY if case.tiny else FAST
    for name, counts in loads(size).items():
        with noting(f"rate, {name} loads", wrong):
            took = take_turns(case, ways(case, size, counts), rounds=TINY_ROUNDS if case.tiny else ROUNDS)
            figures[f"{name} loads, seconds"] = {way: medians(each) for way, each in took.items()}
            figures[f"{name} loads, share of the dense rate"] = shares = attrs.asdict(
                ratio(took["dense"], took["grouped"])
            )
            wrong += [
                f"{name} loads: {part} has {share:.3g} of the rate of a dense product, at least {SHARE:g}"
                for part, share in shares.items()
                if case.is_cuda and not share >= SHARE
            ]
    return Found(figures=figures, wrong=wrong)


if __name__ == "__main__":
    sys.exit(run(test))
