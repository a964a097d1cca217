"""A frozen encoder whose next step is encoded during this one, and nothing else changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_going_on, check_trajectory, run_and_evaluate, run_steps
from tables import SCHEDULES, Table, scheduled, table, world_of
from test_oracle import SP, on
from test_same_samples import Longer, Swapped, Unreadable

from mimo.hooks import DataError
from mimo.schedule.runtime import Record
from mimo.testing import Pool
from mimo.trainer import Trainer

LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "disjoint, lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "disjoint, language pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "colocated, pipelines in both": {"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)},
    "colocated, vision tp2, language tp2 pp2": {
        "vision": on(0, 3, tp=2),
        "language": on(0, 3, tp=2, pp=2, **SP),
    },
    "overlapping, vision tp2": {"vision": on(0, 1, tp=2), "language": on(1, 2, pp=2)},
    "overlapping, vision sp pp3": {"vision": on(0, 5, tp=2, pp=3, **SP), "language": on(5, 6)},
    "vision cp3 pp2, language cp2 dp2, overlapping": {"vision": on(0, 5, cp=3, pp=2), "language": on(4, 7, cp=2)},
    "two encoders, both ahead": {"vision": on(0, 1, cp=2), "glyph": on(2, 3), "language": on(3, 4, tp=2, **SP)},
    "two encoders, one trains": {"vision": on(0, 1, cp=2), "glyph": on(2, 3), "language": on(3, 4, pp=2)},
}


def prefetching(layout: str, *, factor: int = 1, pictures: str = "mixed", schedule: str = "1f1b") -> Table:
    """Return settings of a layout with a frozen encoder that works ahead, and another if both do."""
    modules: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in LAYOUTS[layout].items()}
    for name, keys in modules.items():
        if name == "vision" or (name == "glyph" and "both" in layout):
            keys |= {"frozen": True, "prefetch": True, "batch_factor": factor}
    return scheduled(table(modules, microbatches=4, pictures=pictures), schedule)


@pytest.mark.parametrize(("layout", "factor"), in_turn(LAYOUTS, [1, 2]))
def test_rows_made_a_step_ahead_are_the_same_rows(layout: str, factor: int, oracle: Oracle) -> None:
    """Loss, gradients and weights after three steps equal one process, however the encoder lies and serves."""
    assert oracle.check(prefetching(layout, factor=factor)) == ""


PIPELINED = ["disjoint, language pp2", "colocated, pipelines in both", "overlapping, vision tp2"]


@pytest.mark.parametrize(("schedule", "layout"), in_turn(sorted(SCHEDULES.keys() - {"1f1b"}), PIPELINED))
def test_any_schedule_may_have_an_encoder_ahead(schedule: str, layout: str, oracle: Oracle) -> None:
    """So they do by every other order of work."""
    assert oracle.check(prefetching(layout, factor=2, schedule=schedule)) == ""


@pytest.mark.parametrize(
    ("layout", "pictures"), in_turn(["disjoint, lanes 2 to 3", "overlapping, vision sp pp3"], ["first", "none"])
)
def test_a_step_without_pictures_is_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """Some or all passes of the next step may be empty."""
    assert oracle.check(prefetching(layout, factor=2, pictures=pictures)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["disjoint, language pp2", "overlapping, vision tp2"])
def test_stopping_or_evaluating_in_between_changes_no_bit(layout: str, tmp_path: Path, pool: Pool) -> None:
    """A checkpoint holds nothing of the next step: its rows are encoded again; an evaluation leaves them alone."""
    settings = prefetching(layout, factor=2)
    settings["run"] |= {"steps": 6, "directory": str(tmp_path)}
    world = world_of(settings)
    straight = check_going_on(pool, settings, settings, exactly=True)
    check_trajectory(pool.run(world, run_and_evaluate, settings), straight, exactly=True)


def run_counted(rank: int, settings: Table) -> list[Mapping[str, int]]:
    """Return the rows of each module that each of three steps tells of, with an evaluation in between."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    rows = [trainer.train(1).rows]
    trainer.evaluate(1)
    return [*rows, trainer.train(2).rows, trainer.train(3).rows]


@pytest.mark.parametrize("layout", ["disjoint, lanes 2 to 3", "vision cp3 pp2, language cp2 dp2, overlapping"])
def test_rows_count_for_the_step_that_uses_them(layout: str, pool: Pool) -> None:
    """Each step tells of as many rows as it would if it had encoded them itself."""
    settings = prefetching(layout, factor=2)
    without = copy.deepcopy(settings)
    del without["modules"]["vision"]["prefetch"]
    world = world_of(settings)
    found = pool.run(world, run_counted, settings)
    assert found == pool.run(world, run_counted, without)
    assert len({rows["vision"] for rows in found[0]}) == 3


def run_recorded(rank: int, settings: Table) -> list[Record]:
    """Return what this rank took down of each of three steps."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    records = []
    for step in (1, 2, 3):
        records.append(Record())
        trainer.update(step, trainer.accumulate(step, records[-1]))
    return records


def test_the_next_step_is_encoded_during_this_one(pool: Pool) -> None:
    """While the language model works on a step, the encoder works on the next one's microbatches, in their order."""
    encoder, first, last = pool.run(3, run_recorded, prefetching("disjoint, language pp2"))
    for at in range(2):
        encoded = [moment for moment in encoder[at].moments if moment.action.kind == "forward"]
        assert [moment.action.microbatches for moment in encoded] == [(4,), (5,), (6,), (7,)]
        assert encoded[0].began < last[at].ended
        assert encoded[-1].ended < first[at + 1].ended
    assert {moment.action.kind for moment in encoder[2].moments} == {"send"}  # there is no fourth step


@attrs.frozen
class Torn(Longer):
    """A dataset of which the pictures of one sample can't be decoded."""

    def tokens(self, sample: int) -> Sequence[int]:
        """Return ids; the text is fine."""
        return self.inner.tokens(sample)

    def raw(self, sample: int, index: int) -> Any:
        """Return a picture, unless it is torn."""
        if sample == self.sample:
            raise DataError("torn.png", expected="a picture", got="half of one")
        return self.inner.raw(sample, index)


def run_torn(rank: int, settings: Table, step: int, *, everywhere: bool = True) -> tuple[list[float], str]:
    """Train up to a step of which a picture is torn; return losses, and what this rank says as that step begins.

    It is torn ``everywhere``, or on the machine of rank 0 alone.
    """
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    assert trainer.job.train is not None
    samples = trainer.samples.numbers(step)
    torn = next(sample for sample in samples if trainer.job.train.infos(sample))
    if everywhere or rank == 0:
        trainer.job = attrs.evolve(trainer.job, train=Torn(trainer.job.train, torn))
    losses = [trainer.train(before).loss for before in range(1, step)]
    with pytest.raises(DataError) as raised:
        trainer.train(step)
    return losses, str(raised.value)


@pytest.mark.parametrize(
    ("layout", "step"),
    [("alone", 1), *((layout, step) for layout in ("alone", "disjoint, language pp2") for step in (2, 3))],
)
def test_a_picture_that_cannot_be_decoded_ends_the_step_that_needs_it(layout: str, step: int, pool: Pool) -> None:
    """The step before, in which it was to be encoded, is done like any other."""
    settings = prefetching(layout)
    found = pool.run(world_of(settings), run_torn, settings, step)
    assert len({said for _, said in found}) == 1
    assert "torn.png: expected a picture, got half of one" in found[0][1]
    fine = pool.recall(world_of(settings), run_steps, settings, 1, 3, "")
    assert found[0][0] == [loss for loss, _, _ in fine[0][0]][: step - 1]


def run_torn_here(rank: int, settings: Table, step: int) -> tuple[list[float], str]:
    """The same where rank 0 alone has a torn picture."""
    return run_torn(rank, settings, step, everywhere=False)


@pytest.mark.parametrize("layout", ["overlapping, vision tp2", "two encoders, one trains"])
def test_no_rank_waits_for_one_that_cannot_decode(layout: str, pool: Pool) -> None:
    """Nothing is encoded ahead of which one rank lacks a picture; all say so as the step begins."""
    settings = prefetching(layout)
    found = pool.run(world_of(settings), run_torn_here, settings, 3)
    assert "torn.png: expected a picture, got half of one" in found[0][1]
    assert [(len(losses), said) for losses, said in found] == [(2, found[0][1])] * len(found)


def run_wrong(rank: int, settings: Table, step: int, how: str) -> str:
    """Train up to a step whose samples differ on one rank or have a bad line on all; return what this rank says."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    assert trainer.job.train is not None
    if how == "unreadable":
        sample = trainer.samples.numbers(step)[0]
        trainer.job = attrs.evolve(trainer.job, train=Unreadable(trainer.job.train, sample))
    elif rank == 1:
        trainer.samples.order = Swapped(trainer.samples.order, step=step, at=2, other=95)  # type: ignore[assignment]
    for before in range(1, step):
        assert math.isfinite(trainer.train(before).loss)
    with pytest.raises(DataError) as raised:
        trainer.train(step)
    return str(raised.value)


@pytest.mark.each("how")
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    ("how", "text"), [("swapped", r"step {step}, edge vision->language: expected the same"), ("unreadable", "line 7")]
)
def test_samples_that_differ_or_cannot_be_read_end_their_step(how: str, text: str, step: int, pool: Pool) -> None:
    """Nothing of such a step is encoded ahead, whose routes nobody knows; every rank says the same as it begins."""
    settings = prefetching("overlapping, vision tp2")
    messages = pool.run(3, run_wrong, settings, step, how)
    assert len(set(messages)) == 1
    assert text.format(step=step) in messages[0]
