"""How evenly lanes share the work of ragged samples, placed by count and by cost: computed, and run.

Samples are drawn, 35 of 100 text alone and the others with 1 to 10 pictures, or have the sizes and lengths of published
pictures and clips (`_ragged`; each is fetched by apt, and left out without it). Steps are those of training, of 8
microbatches of 4 samples a lane; of pictures with a caption, which are smaller, of 16 too, and of clips of 32: of 4,
the largest one alone often takes longer than a lane has to do on average. What it takes alone is then the aim of a
lane. For a step the bound is then that of lanes which wait for nothing but the largest samples (`_allowed`).

Ratios are means over steps: the time of the slowest lanes over that of lanes that all have the same to do; and the
simulated time of a step with these over one with those, which is the bound that no placement can pass. Beside them, CPU
milliseconds in which a rank places a microbatch on 1,024 ranks, from the sizes of an index to who owns what: 512 lanes
of the encoder; 64 of the language model, of 8 tensor ranks, or 512. The rule by which steps are placed counts as if all
lanes waited for each other: of small steps whose lanes share nothing but gradients, how much longer they take than by
the better one of count and cost.
Last, steps are run (`_placed_steps`): by count over by cost, and the usual way over ours, of two processes that compute
and eight that sleep.
``nox -s bench -- balance [--rounds N]`` prints them, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TypeAlias

import attrs
import numpy as np
from _found import Found, report
from _placed_steps import run_steps
from _ragged import MICROBATCHES, Sizes, draw_ragged, make_job, read_clips, read_stamps, steps_of
from numpy.typing import NDArray

from mimo.data import ItemSize, SampleSize, SampleSizes
from mimo.schedule import Costs, simulate
from mimo.trainer import Job
from mimo.trainer.runtime import SampleCosts, StepBalance, StepSizes, balance_of, job_costs, step_seconds

Shares: TypeAlias = NDArray[np.float64]
"""What samples or items cost, over what a lane has to do in a microbatch on average."""
SAMPLES = 20_000
LANES = (8, 32, 64)
PIPELINES = (1, 4)
SMALL = 4
"""Microbatches of a small step."""
AIMS, STEP = {"encoder": 1.10, "language": 1.03}, 1.10
"""Aims by cost: slowest lane over mean of either module, and of the step; more where the largest sample alone is."""
MILLISECONDS = 1.0
FREED = 1 << 24
"""Bytes of an array that is freed before: then glibc keeps what smaller ones free, as in a rank, which had tensors."""
SOURCES: Mapping[str, Callable[[], Sizes]] = {
    "drawn": partial(draw_ragged, SAMPLES),
    "stamps": read_stamps,
    "clips": read_clips,
    "stamps, 4 a lane": lambda: attrs.evolve(read_stamps(), micro_batch=4),
    "clips, 4 a lane": lambda: attrs.evolve(read_clips(), micro_batch=4),
}


def compare(name: str, sizes: Sizes) -> Iterator[Found]:
    """Yield the ratios of a distribution for each number of lanes."""
    for lanes in LANES:
        found: defaultdict[str, list[float]] = defaultdict(list)
        aims: dict[str, tuple[str, float]] = {}
        least: defaultdict[str, list[float]] = defaultdict(list)
        steps: list[StepSizes] = []
        for pp in PIPELINES:
            job = make_job(sizes, lanes=lanes, pp=pp)
            costs, whole = SampleCosts(job), job_costs(job)
            bound = simulate(job.plan, job.graph, whole).seconds
            assert job.train is not None
            steps = steps or [StepSizes.of(job, job.train, samples) for samples in steps_of(job)]  # the same by any pp
            for step in steps:
                language, (encoder,) = costs.loads(step, microbatches=MICROBATCHES)
                shares = {
                    module: own.costs / (own.costs.sum() / (lanes * MICROBATCHES))
                    for module, own in (("language", language), ("encoder", encoder))
                }
                least[f"step with pp {pp}"].append(STEP * _allowed(job, whole, shares) / bound)
                for how, balance in balance_of(job, step, costs).items():
                    took = step_seconds(job, whole, balance)
                    found[f"{name}, {lanes} lanes, step with pp {pp}, by {how}"].append(took / bound)
                    for module in shares if pp == 1 else ():
                        least[module].append(float(shares[module].max()))
                        found[f"{name}, {lanes} lanes, {module}, by {how}"].append(
                            statistics.mean(balance.loads(module))
                        )
        for what, values in least.items():
            largest = statistics.mean(max(AIMS.get(what, STEP), one) for one in values)
            aims[f"{name}, {lanes} lanes, {what}, by cost"] = ("<=", round(largest, 3))
        yield Found(ratios={what: [statistics.mean(each)] for what, each in found.items()}, aims=aims)


def regret(name: str, sizes: Sizes) -> Iterator[Found]:
    """Yield how much longer small steps take by cost than by the better way where lanes meet at the end of a step."""
    for each, pp in product((1, 4), PIPELINES):
        job = make_job(attrs.evolve(sizes, micro_batch=each), lanes=2, pp=pp, microbatches=SMALL)
        costs, whole, found = SampleCosts(job), job_costs(job), list[float]()
        assert job.train is not None
        for samples in steps_of(job):
            balances = balance_of(job, StepSizes.of(job, job.train, samples), costs)
            took = {how: step_seconds(job, whole, balance) for how, balance in balances.items()}
            found.append(took["cost"] / min(took.values()))
        what = f"{name}, 2 lanes, {SMALL} microbatches of {each} a lane, pp {pp}, step by cost over the better way"
        yield Found(ratios={what: [statistics.mean(found)], f"{what}, worst": [max(found)]})


def _allowed(job: Job, costs: Costs, shares: Mapping[str, Shares]) -> float:
    """Return seconds of a step whose lanes wait for nothing but its largest samples, wherever the longest pass comes.

    Each pass is as long as the largest thing that must be in one, as lanes take one of the largest each; what then is
    left is spread evenly.
    """
    if all(share.max() <= 1 for share in shares.values()):
        return 0.0
    levels = {module: _levels(share, job.module(module).grid.dp) for module, share in shares.items()}
    found = []
    for peak in range(MICROBATCHES):
        turn = np.argsort(np.argsort(np.abs(np.arange(MICROBATCHES) - peak), kind="stable"))
        group = {module: tuple(own[turn].tolist()) for module, own in levels.items()}
        found.append(step_seconds(job, costs, StepBalance(groups=(group,))))
    return min(found)


def _levels(share: Shares, lanes: int) -> Shares:
    largest, left, found = np.sort(share)[::-1][::lanes], float(MICROBATCHES), list[float]()
    for index in range(MICROBATCHES):
        found.append(max(left / (MICROBATCHES - index), float(largest[index]) if index < len(largest) else 0.0))
        left = max(left - found[-1], 0.0)
    return np.array(found)


def time_placing(rounds: int) -> Iterator[Found]:
    """Yield CPU milliseconds a microbatch on 1,024 ranks, all from what an index says to who owns what."""
    np.empty(FREED, dtype=np.uint8)
    for lanes, tp in ((64, 8), (512, 1)):
        job = make_job(draw_ragged(SAMPLES), lanes=lanes, tp=tp)
        assert job.train is not None
        assert job.world == 1024
        costs, samples = SampleCosts(job), next(steps_of(job))
        known, numbers = _index(job, samples), tuple(range(len(samples)))

        def took(
            job: Job = job, costs: SampleCosts = costs, known: SampleSizes = known, numbers: tuple[int, ...] = numbers
        ) -> float:
            start = time.process_time()
            costs.place(StepSizes.of_index(job, known.take(numbers)))
            return 1000 * (time.process_time() - start) / MICROBATCHES

        took()
        each = len(samples) // MICROBATCHES
        what = f"CPU milliseconds a microbatch to place {each:,} samples on {lanes} lanes, their items on 512"
        yield Found(ratios={what: [took() for _ in range(rounds)]}, aims={what: ("<=", MILLISECONDS)})


def _index(job: Job, samples: Sequence[int]) -> SampleSizes:
    """Return what an index would say of these samples."""
    assert job.train is not None
    found = []
    for layout in (job.lay_out(job.train, sample) for sample in samples):
        items = [
            ItemSize(modality=item.info.modality, number=item.info.index, size=item.info.size, rows=item.rows)
            for item in layout.items
        ]
        size, targets = len(layout.tokens), int(layout.targets.sum())
        found.append(SampleSize(tokens=size, ids=size, targets=targets, weight=targets, items=tuple(items)))
    return SampleSizes.of([encoder.modality for encoder in job.encoders], found)


def main() -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="how often placing is timed, and each step run"
    )
    options = parser.parse_args()
    parts = [*time_placing(options.rounds)]
    for name, read in SOURCES.items():
        try:
            sizes = read()
            parts += compare(name, sizes)
            parts += regret(name, sizes) if name in ("drawn", "clips") else ()
        except OSError as error:
            parts.append(Found(absent={f"{name}, by cost": str(error)}))
    parts += run_steps(options.rounds)
    report("balance", parts, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
