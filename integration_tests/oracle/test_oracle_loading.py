"""Reading beside the step changes no result, in any layout and with any number of threads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Oracle
from resuming import begin
from tables import Table, table, world_of
from test_oracle import SP, on

from mimo.hooks import DataError
from mimo.launch import ProcessInfo
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import measure_job, save_step

LAYOUTS: dict[str, Modules] = {
    "disjoint, lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "two encoders, colocated, tp2 and cp2": {
        "vision": on(0, 1, tp=2, **SP),
        "glyph": on(0, 1, cp=2),
        "language": on(0, 1, tp=2),
    },
    "vision cp2 pp2 a step ahead": {
        "vision": on(0, 3, cp=2, pp=2, frozen=True, prefetch=True, batch_factor=2),
        "language": on(3, 4, pp=2),
    },
    "vision pp2": {"vision": on(0, 1, pp=2), "language": on(2, 2)},
}
LOADING: dict[str, dict[str, Any]] = {
    "by the step": {"workers": 0},
    "by two threads, three steps ahead, each item once": {"workers": 2, "ahead": 3, "hand_on": 0},
    "by the step, some microbatches by one rank": {"workers": 0, "hand_on": 250},
    "by two threads that may hold next to nothing": {"workers": 2, "ahead": 1, "ahead_bytes": 64},
}


def loaded(layout: str, how: str) -> Table:
    """Return settings of a layout with four microbatches."""
    settings = table(LAYOUTS[layout], microbatches=4)
    settings["data"] |= LOADING[how]
    return settings


@pytest.mark.parametrize(("layout", "how"), in_turn(LAYOUTS, [*LOADING]))
def test_loading_beside_the_step_changes_nothing(layout: str, how: str, oracle: Oracle) -> None:
    """Loss, gradients and weights after three steps equal one process that reads by a plain loop."""
    assert oracle.check(loaded(layout, how)) == ""


def run_counting(rank: int, settings: Table) -> list[tuple[int, int]]:
    """Return which items this rank decodes in a step."""
    trainer, decoded = Trainer(make_job(settings), rank=rank, device=CPU), list[tuple[int, int]]()
    train: Any = trainer.job.train
    raw = train.raw

    def counting(sample: int, index: int) -> Any:
        decoded.append((sample, index))
        return raw(sample, index)

    train.raw = counting
    trainer.accumulate(1)
    trainer.close()
    return decoded


def test_ranks_of_a_lane_decode_each_item_once(pool: Pool) -> None:
    """Where they hand on; otherwise each decodes all of them."""
    settings = table({"vision": on(0, 3, cp=2, tp=2, **SP), "language": on(0, 0)}, microbatches=2)
    settings["data"] |= {"workers": 2, "ahead": 0}
    settings["run"]["steps"] = 1  # else the next step is read too
    alone, shared = (
        pool.run(4, run_counting, {**settings, "data": {**settings["data"], "hand_on": bound}}) for bound in (10**6, 0)
    )
    once = sorted(alone[0])
    assert len(set(once)) == len(once) > 0
    assert all(sorted(found) == once for found in alone)
    assert sorted(item for found in shared for item in found) == once
    assert all(len(found) < len(once) for found in shared)


def run_profiling(rank: int, settings: Table) -> Counter[tuple[int, int]]:
    """Return how often this rank decodes each item while what computations take is measured."""
    job, decoded = make_job(settings), Counter[tuple[int, int]]()
    train: Any = job.train
    raw = train.raw

    def counting(sample: int, index: int) -> Any:
        decoded[sample, index] += 1
        return raw(sample, index)

    train.raw = counting
    measure_job(job, ProcessInfo(rank=rank, world=1, local_rank=rank, device="cpu"))
    return decoded


@pytest.mark.soak
def test_a_profile_times_no_decoding(pool: Pool) -> None:
    """Items are decoded once for all rounds of a measurement.

    There are those of microbatches of 1, 2 and 4 samples, with whole and with split backwards, and one of what is kept.
    """
    settings = table({"vision": on(0, 0), "language": on(0, 0)}, microbatches=6)
    (decoded,) = pool.run(1, run_profiling, settings)
    assert decoded
    assert max(decoded.values()) == 2 * 3 + 1


BROKEN = [4, 13, 25, 26, 51, 68, 77, 90]


def with_broken(layout: str, how: str) -> Table:
    """Return settings under which the first pictures of eight of 96 samples can't be decoded."""
    settings = loaded(layout, how)
    settings["data"] |= {"damaged": BROKEN, "max_broken": 0.1}
    return settings


@pytest.mark.parametrize(("layout", "how"), in_turn(LAYOUTS, [*LOADING]))
def test_broken_pictures_leave_the_same_rest_in_every_layout(layout: str, how: str, oracle: Oracle) -> None:
    """Their rows are zeros and their samples weigh nothing, as in one plain process; all else is learned."""
    assert oracle.check(with_broken(layout, how)) == ""


def run_listing(rank: int, settings: Table) -> tuple[list[tuple[int, int]], dict[tuple[int, int], bool]]:
    """Return the items that a rank knows to be broken in two steps, and which of those that it encodes are zeros."""
    trainer, known = Trainer(make_job(settings), rank=rank, device=CPU), list[tuple[int, int]]()
    zeros: dict[tuple[int, int], bool] = {}

    def listing(program: Any) -> None:
        forward = program.forward

        def listed(microbatches: tuple[int, ...], inputs: Any) -> Any:
            outputs = forward(microbatches, inputs)
            for rows in outputs.values():
                items = [it for n in microbatches for it in program.data.microbatches[n].items(program.module, place)]
                parts = rows.detach().split([item.rows for item in items])
                named = [(item.info.sample, item.info.index) for item in items]
                zeros.update({name: not part.any() for name, part in zip(named, parts, strict=True) if len(part)})
            return outputs

        place, program.forward = program.place.dp, listed

    for program in trainer.programs:
        if program.module.name == "vision" and program.part.stage.is_last:
            listing(program)
    for step in (1, 2):
        trainer.train(step)
        for layout in trainer.data.layouts:
            known += [(layout.sample, item.info.index) for item in layout.items if item.is_broken]
    return known, zeros


@pytest.mark.parametrize("layout", ["disjoint, lanes 2 to 3", "vision pp2"])
def test_only_the_rows_of_a_broken_picture_are_zeros(layout: str, pool: Pool) -> None:
    """All ranks know which one it is, also those that make its rows and have not decoded it; others are encoded."""
    settings = with_broken(layout, "by two threads, three steps ahead, each item once")
    found = pool.run(world_of(settings), run_listing, settings)
    known = found[0][0]
    assert known
    assert {index for _, index in known} == {0}
    assert all(listed == known for listed, _ in found)
    zeros = {name: is_zero for _, each in found for name, is_zero in each.items()}
    assert {name for name, is_zero in zeros.items() if is_zero} == {name for name in known if name in zeros} != set()
    assert any(sample in dict(known) and index for sample, index in zeros)


def run_broken(rank: int, settings: Table, share: float) -> tuple[list[int], str]:
    """Return how many samples of each of three steps are broken, and what ends the run before its end."""
    settings = {**settings, "data": {**settings["data"], "max_broken": share}}
    trainer, counts = Trainer(make_job(settings), rank=rank, device=CPU), list[int]()
    for step in (1, 2, 3):
        try:
            counts.append(trainer.train(step).broken)
        except DataError as error:
            return counts, str(error)
    return counts, ""


@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_all_ranks_count_the_same_broken_samples_and_stop_beyond_the_share(layout: str, pool: Pool) -> None:
    """At the beginning of the step that has one too many, with the place of a sample in words that are the same."""
    settings = with_broken(layout, "by two threads, three steps ahead, each item once")
    world = world_of(settings)
    (first, none), *others = pool.run(world, run_broken, settings, 0.5)
    assert (sum(first) > 3, none) == (True, "")
    assert others == [(first, "")] * len(others)
    share = (sum(first[:2]) - 1) / 96
    (counts, said), *others = pool.run(world, run_broken, settings, share)
    assert counts == first[: len(counts)]
    assert len(counts) < 2
    assert "synthetic:" in said
    assert f"in all but {sum(first[:2]) - 1} of 96 samples" in said
    assert others == [(counts, said)] * len(others)


def run_some(rank: int, settings: Table, first: int, last: int) -> tuple[list[int], str]:
    """Return the same of some steps, resumed where there were others before them, and save the last one."""
    trainer, _, state = begin(rank, settings, settings["run"]["directory"] if first > 1 else "")
    counts = list[int]()
    for step in range(first, last + 1):
        try:
            counts.append(trainer.train(step).broken)
        except DataError as error:
            return counts, str(error)
    save_step(trainer, state, [], last)
    return counts, ""


def test_a_resumed_run_keeps_counting_broken_samples(tmp_path: Path, pool: Pool) -> None:
    """What it met before it was resumed counts towards the share, whoever has met it."""
    settings = with_broken("vision pp2", "by two threads, three steps ahead, each item once")
    settings["run"]["directory"] = str(tmp_path)
    whole = pool.run(3, run_broken, settings, 0.5)[0][0]
    assert whole[1] > 0 < whole[2]
    settings["data"]["max_broken"] = (sum(whole) - 1) / 96
    assert pool.run(3, run_some, settings, 1, 2)[0] == (whole[:2], "")
    counts, said = pool.run(3, run_some, settings, 3, 3)[0]
    assert counts == []
    assert f"in all but {sum(whole) - 1} of 96 samples" in said
    assert f"got the {sum(whole)}th sample without" in said


def run_waiting(rank: int, settings: Table) -> list[float]:
    """Return the seconds that steps have waited for data, as this rank has them of the agreement."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    return [trainer.train(step).data_seconds for step in (1, 2)]


def test_all_ranks_know_how_long_the_slowest_has_waited_for_data(pool: Pool) -> None:
    """Also the ranks of the language model, which decode nothing."""
    settings = loaded("disjoint, lanes 2 to 3", "by the step")
    first, *others = pool.run(world_of(settings), run_waiting, settings)
    assert all(seconds > 0 for seconds in first)
    assert others == [first] * len(others)
