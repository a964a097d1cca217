"""Time of a model's parts in our form beside another form of the same computation, in one process.

*Decoder*: forward and backward beside `transformers`' model of the same configuration, with the same weights and
samples: of one length, and of the lengths of real texts, which there are padded. *hf-decoder*: likewise, the library's
own layers on packed rows beside the library alone. *Compiled*: our decoder with compiled layers beside itself.
*Vision*: images at their own sizes packed, beside padded to the
largest. *Mamba-2*: forward and backward of the scan by chunks beside the recurrence row by row, on two packed samples.

Both of a pair take turns in one run, and each turn gives a ratio. Forms that must agree are compared before they are
timed. ``nox -s bench -- model [--rounds N] [--threads N ...] [--cpu] [--only TEXT]`` prints a table, and as its last
line one JSON object. With ``--cpu`` CPU seconds count, on a machine where others compute too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import _native
import attrs
import torch
import torch.distributed as dist
from _published import TEXT_LENGTHS, Llama
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mimo.model.runtime import SampleChunks, ScanInputs, scan_by_chunks, scan_by_row
from mimo_transformers import HF_DECODER

HEADS, WIDTH, GROUPS, STATE = 8, 64, 1, 64
CHUNK = 64
SMALL = "hidden 256, 4 layers, 8 samples of 128"
LLAMAS = {
    "hidden 512, 8 layers, 2 samples of 512": Llama(hidden=512, layers=8, lengths=(512,) * 2),
    SMALL: Llama(hidden=256, layers=4, lengths=(128,) * 8),
}
TEXTS = Llama(hidden=256, layers=4, lengths=tuple(min(length, 512) for length in TEXT_LENGTHS[:16]))


@attrs.frozen(kw_only=True)
class Pair:
    """Two ways to compute the same: ``ours`` over ``other`` is the ratio."""

    what: str
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
    inputs = ScanInputs(x=x, steps=steps, rates=rates, b=b, c=c, skip=skip)
    given = [value.requires_grad_() for value in attrs.astuple(inputs, recurse=False)]
    chunks = SampleChunks.of((rows // 3, rows - rows // 3), chunk=CHUNK)

    def run(form: Callable[..., tuple[Tensor, Tensor]]) -> None:
        torch.autograd.grad(form(inputs, chunks)[0].sum(), given)

    return Pair(
        what=f"Mamba-2, {rows} rows, chunks / row by row",
        ours=lambda: run(scan_by_chunks),
        other=lambda: run(scan_by_row),
        aim=("<=", 0.2),
    )


def pairs(mesh: DeviceMesh) -> Iterator[Pair]:
    """Yield all that is compared; what one pair needs is gone before the next is made."""
    for name, llama in LLAMAS.items():
        ours, theirs = llama.steps(mesh)
        check(ours, theirs)
        yield Pair(what=f"decoder / transformers, {name}", ours=ours, other=theirs, aim=("<=", 1.0))
    ours, theirs = TEXTS.steps(mesh)
    check(ours, theirs)
    name = f"{len(TEXTS.lengths)} texts of {min(TEXTS.lengths)} to {max(TEXTS.lengths)}"
    yield Pair(what=f"decoder packed / transformers padded, {name}", ours=ours, other=theirs, aim=("<=", 1.0))
    for what, llama, aim in (
        (f"{SMALL}, packed / alone", LLAMAS[SMALL], 1.05),
        (f"{name}, packed / padded", TEXTS, 0.5),
    ):
        ours, theirs = llama.steps(mesh, HF_DECODER)
        check(ours, theirs)
        yield Pair(what=f"hf-decoder / transformers, {what}", ours=ours, other=theirs, aim=("<=", aim))
    for what, llama in ((SMALL, LLAMAS[SMALL]), (name, TEXTS)):
        compiled, eager = llama.compiled(mesh)
        check(compiled, eager)
        yield Pair(what=f"decoder compiled / eager, {what}", ours=compiled, other=eager)
    packed, largest, padded = _native.steps()
    check(packed, padded)
    yield Pair(what="vision packed / all as the largest", ours=packed, other=largest, aim=("<=", 1.0))
    yield Pair(what="vision packed / transformers padded", ours=packed, other=padded, aim=("<=", 1.0))
    for rows in (256, 2048):
        yield scans(rows)


def check(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """Refuse forms that do not compute the same."""
    found, wanted = float(ours()), float(theirs())
    assert abs(found - wanted) <= 1e-5 * abs(wanted), (found, wanted)


def turns(pair: Pair, rounds: int, clock: Callable[[], float]) -> Iterator[tuple[float, float]]:
    """Yield how long both of a pair took, turn by turn."""
    for turn in range(rounds + 1):
        taken = []
        for way in (pair.ours, pair.other):
            begun = clock()
            way()
            taken.append(clock() - begun)
        if turn:  # the first one makes buffers
            yield taken[0], taken[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, of which the median counts")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch, one after the other")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds of all threads")
    parser.add_argument("--only", default="", help="pairs with this in their names")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ratios, spread, aims = {}, {}, {}
    for pair in pairs(init_device_mesh("cpu", (1,))):
        if options.only not in pair.what:
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            what = f"{pair.what}, {threads} thread{'s' if threads > 1 else ''}"
            found = list(turns(pair, options.rounds, clock))
            each = [ours / other for ours, other in found]
            ours, other = (statistics.median(column) for column in zip(*found, strict=True))
            ratios[what], spread[what] = statistics.median(each), [min(each), max(each)]
            if pair.aim is not None:
                aims[what] = pair.aim
            print(f"{what}: {ours * 1e3:.1f} ms / {other * 1e3:.1f} ms = {ratios[what]:.3f}", flush=True)
    dist.destroy_process_group()
    print(json.dumps({"bench": "model", "ratios": ratios, "aims": aims, "runs": options.rounds, "spread": spread}))


if __name__ == "__main__":
    main()
