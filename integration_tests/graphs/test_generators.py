"""The oracle over generators: in every layout of both modules what items made one by one come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Modules
from jobs import CPU, make_job
from oracle import Oracle, Piece
from resuming import check_going_on, same_bits
from tables import Table, alone, by_tokens, scheduled, table, world_of
from torch import Tensor

from mimo.testing import Pool
from mimo.trainer import Trainer

SP: Mapping[str, Any] = {"sequence_parallel": True}
ROLES: Mapping[str, Sequence[str]] = {"image": ("input", "output", "both")}


def on(first: int, last: int, **keys: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``, and other keys of its module."""
    return {"ranks": list(range(first, last + 1)), **keys}


def drawer(first: int, last: int, **keys: Any) -> dict[str, Any]:
    """Return the same of a generator."""
    return on(first, last, fed_by="language", **{"loss_weight": 0.7, **keys})


OWN: Mapping[str, Any] = {"config": {"reads": "own", "rows": 3}}
LAYOUTS: dict[str, Modules] = {
    "apart": {"vision": on(0, 0), "language": on(1, 1), "drawer": drawer(2, 2)},
    "together": {"vision": on(0, 1), "language": on(0, 1), "drawer": drawer(0, 1, **OWN)},
    "more lanes": {"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(0, 2)},
    "tp2 sp": {"vision": on(0, 0), "language": on(0, 1, tp=2, round_rows=3, **SP), "drawer": drawer(1, 2)},
    "tp2": {"vision": on(0, 1), "language": on(0, 1, tp=2), "drawer": drawer(1, 2, **OWN)},
    "cp2": {"vision": on(0, 0), "language": on(0, 3, cp=2), "drawer": drawer(3, 3)},
    "cp2 tp2 sp": {"vision": on(0, 0), "language": on(0, 3, cp=2, tp=2, **SP), "drawer": drawer(2, 4)},
    "pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2), "drawer": drawer(3, 3, batch_factor=2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_changes_what_is_drawn(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with weights of targets."""
    settings = table(LAYOUTS[layout], microbatches=2, weights="mixed", roles=ROLES)
    assert oracle.check(settings) == ""


FLOW: Mapping[str, Any] = {"height": 4, "width": 6, "channels": 1, "patch": 2, "hidden": 24, "layers": 2, "heads": 2}
FLOWS: dict[str, Modules] = {
    "lanes": {"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(0, 2)},
    "tp2": {"vision": on(0, 0), "language": on(0, 1, tp=2, **SP), "drawer": drawer(1, 2, tp=2, recompute="full")},
    "shards": {"vision": on(0, 0), "language": on(1, 2), "drawer": drawer(0, 1, optimizer={"shard": "full"})},
    "tp2 lanes": {"vision": on(0, 1), "language": on(2, 3, cp=2), "drawer": drawer(0, 3, tp=2)},
}


@pytest.mark.parametrize("reads", ["before", "own"])
@pytest.mark.parametrize("layout", FLOWS)
def test_layout_never_changes_a_flow(layout: str, reads: str, oracle: Oracle) -> None:
    """Noise, times, and what is made without its rows follow from the sample alone."""
    settings = table(FLOWS[layout], microbatches=2, roles=ROLES)
    config = {**FLOW, "intermediate": 40, "drop_condition": 0.2, "reads": reads}
    settings["modules"]["drawer"] |= {"plugin": "flow", "config": config}
    if "optimizer" in settings["modules"]["drawer"]:
        settings["optimizer"] |= {"plugin": "distributed"}
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "ahead"])
def test_schedules_draw_the_same(schedule: str, oracle: Oracle) -> None:
    """What the last stage makes leaves it for a module behind it, wherever that lies."""
    modules = {"vision": on(0, 0), "language": on(0, 1, pp=2), "drawer": drawer(1, 2, **OWN)}
    assert oracle.check(scheduled(table(modules, microbatches=4, roles=ROLES), schedule)) == ""


PATCHES: Mapping[str, Any] = {"plugin": "flow", "config": {**FLOW, "intermediate": 40, "drop_condition": 0.2}}
LENSES: dict[str, Modules] = {
    "frozen, a step ahead": {
        "vision": on(0, 0),
        "lens": on(2, 3, frozen=True, prefetch=True, batch_factor=2),
        "language": on(0, 1),
        "drawer": drawer(1, 2),
    },
    "elsewhere": {"vision": on(0, 0), "lens": on(3, 3), "language": on(0, 1), "drawer": drawer(1, 2)},
    "tp2 cp2": {
        "vision": on(0, 0),
        "lens": on(0, 3, cp=2, tp=2, **SP),
        "language": on(0, 1, cp=2),
        "drawer": drawer(2, 3, batch_factor=2),
    },
    "pp2": {
        "vision": on(0, 0),
        "lens": on(1, 2, pp=2, batch_factor=2),
        "language": on(0, 1, pp=2),
        "drawer": drawer(1, 2, pp=2, **PATCHES),
    },
    "drawn by tp2 cp2 sp": {
        "vision": on(0, 0),
        "lens": on(0, 2),
        "language": on(0, 1, tp=2, **SP),
        "drawer": drawer(0, 3, cp=2, tp=2, batch_factor=2, **SP, **PATCHES),
    },
    "drawn by cp2, in two stages": {
        "vision": on(0, 0),
        "lens": on(0, 3, cp=2),
        "language": on(2, 3, cp=2),
        "drawer": drawer(0, 3, cp=2, pp=2, recompute="full", **PATCHES),
    },
}
"""An encoder of the generator's own beside that of the language model."""
SHARED: dict[str, Modules] = {
    "elsewhere": {"vision": on(3, 3), "language": on(0, 1), "drawer": drawer(1, 2)},
    "together": {"vision": on(0, 1, config={"drop_path": 0.3}), "language": on(0, 1), "drawer": drawer(0, 1, **OWN)},
    "tp2 cp2 sp": {
        "vision": on(0, 3, cp=2, tp=2, batch_factor=2, **SP),
        "language": on(0, 1, cp=2),
        "drawer": drawer(2, 3),
    },
    "pp2": {
        "vision": on(0, 1, pp=2, batch_factor=2),
        "language": on(1, 2, pp=2),
        "drawer": drawer(2, 3, cp=2, **PATCHES),
    },
    "its tower a step ahead": {
        "vision": on(1, 3, frozen=["encoder"], prefetch=True),
        "language": on(0, 1, tp=2, **SP),
        "drawer": drawer(1, 2, batch_factor=2),
    },
}
"""One encoder that feeds the language model and the generator."""
LENS: Mapping[str, Any] = {"patch": 1, "channels": 1, "width": 24, "layers": 2, "heads": 6, "intermediate": 37}
"""Config of that encoder."""


@pytest.mark.parametrize("layout", LENSES)
def test_generators_see_what_stands_before(layout: str, oracle: Oracle) -> None:
    """An encoder's rows of the items before it go to each item that is made, wherever both lie."""
    modules = {
        name: {**keys, **({"feeds": "drawer"} if name == "lens" else {})} for name, keys in LENSES[layout].items()
    }
    modules["lens"]["config"] = LENS
    assert oracle.check(table(modules, microbatches=2, pictures="many", roles=ROLES)) == ""


@pytest.mark.parametrize("layout", SHARED)
def test_generators_see_what_the_language_model_does(layout: str, oracle: Oracle) -> None:
    """Gradients of both reach the encoder's rows, those alone of what stands before an item that is made."""
    modules = {name: dict(keys) for name, keys in SHARED[layout].items()}
    modules["vision"] |= {"feeds": ["language", "drawer"], "config": {**LENS, **modules["vision"].pop("config", {})}}
    assert oracle.check(table(modules, microbatches=2, pictures="many", roles=ROLES)) == ""


def test_an_encoder_feeds_two_generators(oracle: Oracle) -> None:
    """Each is sent the rows of what stands before its own items."""
    modules = {
        "vision": on(0, 0),
        "lens": on(1, 3, feeds=["scribe", "drawer"], config=LENS),
        "language": on(0, 1),
        "drawer": drawer(1, 2),
        "scribe": drawer(2, 3, **OWN),
    }
    roles = {"image": ("input", "output", "both"), "glyph": ("output",)}
    assert oracle.check(table(modules, microbatches=2, pictures="many", roles=roles)) == ""


JOINT: Modules = {
    "vision": on(0, 1),
    "glyph": on(2, 2),
    "teacher": on(0, 0, distil={"top_k": 3}, loss_weight=0.4),
    "language": on(1, 2, cp=2, loss_weight=0.5, recompute="full"),
    "drawer": drawer(0, 2),
    "scribe": drawer(1, 1, loss_weight=1.3, batch_factor=2, **OWN),
}
"""Two encoders, a teacher, and two generators."""


@pytest.mark.parametrize("pictures", ["many", "first", "none"])
def test_all_kinds_of_modules_in_one_graph(pictures: str, oracle: Oracle) -> None:
    """Each loss by its own count; steps and lanes without anything to make are ordinary."""
    roles = {"image": ("input", "output"), "glyph": ("output", "both")}
    settings = table(JOINT, microbatches=2, pictures=pictures, weights="mixed", roles=roles)
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("frozen", ["language", "drawer", "vision"])
def test_what_is_frozen_hands_gradients_on(frozen: str, oracle: Oracle) -> None:
    """A frozen generator still teaches what feeds it; a frozen language model that nothing feeds gets no gradient."""
    modules = {"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(1, 2)}
    modules[frozen]["frozen"] = True
    assert oracle.check(table(modules, microbatches=2, roles=ROLES)) == ""


AHEAD: dict[str, Modules] = {
    "lanes": {"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(1, 2, **OWN)},
    "pp2": {"vision": on(0, 1, pp=2), "language": on(1, 2, pp=2, chunks=2), "drawer": drawer(2, 3)},
    "cp2 tp2 sp": {"vision": on(0, 0), "language": on(0, 3, cp=2, tp=2, **SP), "drawer": drawer(3, 4)},
    "a teacher": {
        "vision": on(0, 0),
        "teacher": on(1, 1, distil={"top_k": 3}),
        "language": on(0, 1),
        "drawer": drawer(1, 2),
    },
}
"""A language model that is frozen, as all is that feeds it."""
MIXED: Mapping[str, Any] = {"layers": 4, "experts": 4, "experts_per_token": 2, "balance_loss": 0.1, "next_tokens": 1}


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("cp2 tp2 sp", "1f1b"),
        ("pp2", "interleaved"),
        ("a teacher", "zb-h1"),
        ("pp2", "ahead"),
        ("pp2", "1f1b"),
        ("lanes", "ahead"),
    ],
)
def test_a_frozen_language_model_is_run_a_step_ahead(layout: str, schedule: str, oracle: Oracle) -> None:
    """So that what is learned of it is as if it were not."""
    assert oracle.check(_frozen(layout, schedule)) == ""


def _frozen(layout: str, schedule: str = "1f1b", *, prefetch: bool = True) -> Table:
    """Return settings of a frozen language model with all that feeds it, perhaps a step ahead."""
    modules = {name: dict(keys) for name, keys in AHEAD[layout].items()}
    if schedule != "interleaved":
        modules["language"].pop("chunks", None)
    for name in modules.keys() - {"drawer"}:
        modules[name] |= {"prefetch": prefetch, **({} if name == "teacher" else {"frozen": True})}
    settings = table(modules, microbatches=4, pictures="many", weights="mixed", language=MIXED, roles=ROLES)
    settings["data"]["max_tokens"] = 24  # so that some are cut
    return scheduled(settings, schedule)


def _counted(rank: int, settings: Table) -> list[Any]:
    """Return what each of three steps reports, with an evaluation between them."""
    trainer, found = Trainer(make_job(settings), rank=rank, device=CPU), list[Any]()
    for step in (1, 2, 3):
        info = trainer.train(step)
        held_out = trainer.evaluate(step)
        assert held_out is not None
        counted = (info.rows, info.truncated, info.label_tokens, info.label_weight, info.counts)
        found.append((info.loss, info.losses, *counted, held_out.loss, held_out.losses))
    return found


@pytest.mark.soak
def test_what_is_run_a_step_ahead_counts_for_the_step_of_its_samples(pool: Pool) -> None:
    """Losses of labels, of routers and of further tokens, rows and cut samples, whatever is evaluated between."""
    ahead, beside = (pool.run(3, _counted, _frozen("lanes", prefetch=prefetch)) for prefetch in (True, False))
    assert ahead == beside
    (_, losses, rows, truncated, *_), second, third = ahead[0]
    assert {"balance", "next_tokens", "drawer.loss"} == losses.keys()
    assert rows["language"] > 0 < truncated
    assert len({one[0] for one in (ahead[0][0], second, third)}) == 3


@pytest.mark.soak
def test_a_run_resumes_with_its_language_model_a_step_ahead(pool: Pool, tmp_path: Path) -> None:
    """The first step makes what the last one before did not get to use."""
    settings = _frozen("lanes")
    settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, settings, settings, exactly=True)


@pytest.mark.each("weights")
@pytest.mark.parametrize("weights", ["zero", "first"])
def test_items_are_learned_where_no_label_counts(weights: str, oracle: Oracle) -> None:
    """A step without the weight of any label is none without targets."""
    modules = {"vision": on(0, 0), "language": on(0, 1, tp=2), "drawer": drawer(1, 2)}
    assert oracle.check(table(modules, microbatches=2, weights=weights, roles=ROLES)) == ""


@pytest.mark.parametrize("pictures", ["many", "first"])
def test_a_model_that_learns_to_draw_alone(pictures: str, oracle: Oracle) -> None:
    """The labels' loss only reported, so that a step with nothing to make changes nothing; nothing is read."""
    modules = {"language": on(0, 1, loss_weight=0.0), "drawer": drawer(1, 2)}
    settings = table(modules, microbatches=3, pictures=pictures)
    settings["optimizer"]["weight_decay"] = 0.1
    assert oracle.check(settings) == ""


def test_broken_items_are_not_learned(oracle: Oracle) -> None:
    """Whether they are read or made: nothing of their samples is."""
    modules = {"vision": on(0, 1), "language": on(1, 2), "drawer": drawer(0, 2)}
    settings = table(modules, microbatches=2, roles=ROLES)
    settings["data"] |= {"damaged": [2, 3, 5, 7, 11, 13], "max_broken": 1.0}
    assert oracle.check(settings) == ""


@pytest.mark.parametrize(
    "changes", [{"plugin": "distributed", "shard": "full"}, {"plugin": "cpu-offload", "fraction": 0.5}]
)
def test_optimizers_step_generators(changes: Mapping[str, Any], oracle: Oracle) -> None:
    """Sharded over their lanes too."""
    settings = table({"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(0, 2)}, microbatches=2, roles=ROLES)
    settings["optimizer"] |= changes
    assert oracle.check(settings) == ""


def test_cut_samples_and_ragged_steps(oracle: Oracle) -> None:
    """Microbatches by tokens, with samples too long cut before an item."""
    settings = table({"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(1, 2)}, pictures="many", roles=ROLES)
    assert oracle.check(by_tokens(settings, batch_tokens=130, micro_tokens=45)) == ""


@pytest.mark.soak
def test_experts_beside_a_generator(oracle: Oracle) -> None:
    """Losses of routers and of later tokens enter as without one."""
    config = {"experts": 4, "dense_layers": 1, "balance_loss": 0.05, "next_tokens": 1, "next_tokens_loss": 0.3}
    modules = {"vision": on(0, 0), "language": on(0, 1, ep=2), "drawer": drawer(2, 2)}
    assert oracle.check(oracle.clear(table(modules, microbatches=2, language=config, roles=ROLES))) == ""


def _reported(rank: int, settings: Table) -> tuple[float, float, int]:
    """Return the loss of a generator that a step reports, and an evaluation before it, and its rows."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    first, again = trainer.evaluate(0), trainer.evaluate(0)
    assert first is not None
    assert again is not None
    assert first.losses == again.losses  # by the same noise
    step = trainer.train(1)
    return step.losses["drawer.loss"], first.losses["drawer.loss"], step.rows["drawer"]


def test_losses_of_generators_are_reported(oracle: Oracle, pool: Pool) -> None:
    """By steps and evaluations, over their own targets, the same in any layout."""
    settings = table(LAYOUTS["cp2"], microbatches=2, weights="mixed", roles=ROLES)
    (step, held_out, rows), *_ = pool.run(1, _reported, alone(settings))
    assert step == pytest.approx(oracle.truth(settings).terms["drawer.loss"][0], rel=1e-5)
    assert held_out > 0
    for found in pool.run(world_of(settings), _reported, settings):
        assert found == (pytest.approx(step, rel=1e-5), pytest.approx(held_out, rel=1e-5), rows)


@pytest.mark.soak
@pytest.mark.parametrize("pictures", ["first", "none"])
def test_losses_without_a_target_are_reported_as_zero(pictures: str, pool: Pool) -> None:
    """On every rank, by a step, and by an evaluation of what has nothing to make; never as what is no number."""
    settings = table(LAYOUTS["cp2"], microbatches=2, pictures=pictures, roles=ROLES)
    for step, held_out, rows in pool.run(world_of(settings), _reported, settings):
        assert (step, rows) == (0.0, 0)
        assert held_out == 0.0 if pictures == "none" else held_out > 0


def test_a_run_resumes_with_its_generator_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    """Module by module, each wherever it lies then."""
    first, second = (table(LAYOUTS[layout], microbatches=2, roles=ROLES) for layout in ("pp2", "more lanes"))
    for settings in (first, second):
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, first, second, exactly=False)


def _noisy() -> Table:
    """Return settings of a flow in two stages, which draws noise, times, and whether it reads the rows of an item."""
    flow = {**FLOW, "intermediate": 40, "drop_condition": 0.5}
    modules = {
        "vision": on(0, 0),
        "language": on(0, 1),
        "drawer": drawer(1, 2, pp=2, plugin="flow", config=flow, recompute="full"),
    }
    return table(modules, microbatches=2, roles=ROLES)


@pytest.mark.soak
def test_a_run_resumes_with_its_noise_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    """In the same layout as if it had never stopped: nothing of what is drawn has a state that could be lost."""
    settings = _noisy()
    settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, settings, settings, exactly=True)


def _run_twice(rank: int, settings: Table) -> list[list[dict[str, Tensor]]]:
    """Return the gradients and losses of each of two steps when it is run first, and when it is run again."""
    trainer, found = Trainer(make_job(settings), rank=rank, device=CPU), []
    for step in (1, 2):
        share, runs = trainer.accumulate(step), []
        for again in (False, True):
            share = trainer.repeat() if again else share
            parts = [module.part for module in trainer.optimizer.modules.values()]
            gradients = {name: value.grad for part in parts for name, value in part.parameters.items()}
            held = {name: Piece.of(value).values for name, value in gradients.items() if value is not None}
            sums = {
                "loss": share.loss,
                "rows": sum(share.rows.values()),
                "drawn": share.extra_sums.get("drawer.loss", 0),
            }
            runs.append(
                {name: torch.from_numpy(values) for name, values in held.items()}
                | {name: torch.as_tensor(value) for name, value in sums.items()}
            )
        trainer.update(step, share)
        found.append(runs)
    return found


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_step_that_is_run_again_draws_the_same_noise(prefetch: bool, pool: Pool) -> None:
    """Every gradient and loss is the same to the bit, of each step another one, also where it is made a step ahead."""
    settings = _noisy()
    for name in ("vision", "language") if prefetch else ():
        settings["modules"][name] |= {"frozen": True, "prefetch": True}
    for steps in pool.run(3, _run_twice, settings):
        assert all(same_bits(first, again) for first, again in steps)
        assert not same_bits(steps[0][0], steps[1][0])
