"""Language models that learn further tokens than the next, in all kinds of layouts, beside the truth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_trajectory, run_and_save, run_steps
from tables import Table, alone, scheduled, table, world_of
from test_memory_estimate import PLUGINS
from test_memory_estimate import check as check_memory
from test_oracle import SP, on
from test_oracle_mamba import CONFIG as HYBRID
from test_resume import settings_of as saving

from mimo.testing import Pool
from mimo.trainer import Trainer

SEED = 85
"""With which every row's choice of experts is clear, see `oracle.GAP`."""
FURTHER: Mapping[str, Any] = {"next_tokens": 2, "next_tokens_loss": 0.3}
LAYOUTS: dict[str, Modules] = {
    "pp2 cp2, tied": {"vision": on(0, 0), "language": on(0, 3, pp=2, cp=2)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "tp3 sp": {"vision": on(0, 0), "language": on(1, 3, tp=3, **SP)},
    "pp2": {"vision": on(0, 1), "language": on(0, 1, pp=2)},
    "tp2, colocated": {"vision": on(0, 1), "language": on(0, 1, tp=2)},
    "cp2": {"vision": on(0, 0), "language": on(1, 2, cp=2)},
    "pp2 tp2 cp2 sp, tied": {"vision": on(0, 1), "language": on(0, 7, pp=2, tp=2, cp=2, **SP)},
}
HOW = [(4, "none"), (1, "mixed"), (4, "first")]
"""Microbatches, and weights of tokens."""
RARE = [*LAYOUTS][3:]
"""Those that the soak alone runs: other tests below show what they do."""
SPREAD: Mapping[str, Mapping[str, Any]] = {
    "full": {"plugin": "distributed", "shard": "full"},
    "optimizer": {"plugin": "distributed", "shard": "optimizer", "overlap_grad_reduce": True},
    "gradients": {"plugin": "distributed", "shard": "gradients"},
    "hybrid": {"plugin": "cpu-offload", "shard": "full", "fraction": 0.5},
}
TOLD = ("adamw", "full", "hybrid 0.3")
OFTEN = [("zb-h1", ("full", "full")), ("zb-v", ("none", "optimizer"))]
FROZEN = {
    "all but these": ["embedding", "layers", "head"],
    "these": ["next_tokens"],
    "the embedding": ["embedding"],
    "all but the embedding": ["layers", "head", "next_tokens"],
}


def settings_of(layout: str, **more: Any) -> Table:
    """Return the settings of a layout with a decoder that learns two further tokens."""
    return table(LAYOUTS[layout], language={**FURTHER, "tied": layout.endswith("tied")}, **more)


@pytest.mark.parametrize(
    ("layout", "how"),
    in_turn([*LAYOUTS][:3], HOW) + [pytest.param(*case, marks=pytest.mark.soak) for case in product(RARE, HOW)],
)
def test_layout_never_changes_the_result(layout: str, how: tuple[int, str], oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0, 1 or 3 pictures a sample, uneven labels and weights."""
    microbatches, weights = how
    assert oracle.check(settings_of(layout, microbatches=microbatches, weights=weights)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "ep"), [("pp2 tp2 cp2 sp, tied", 2), *(pytest.param(one, 1, marks=pytest.mark.soak) for one in LAYOUTS)]
)
def test_experts_and_mamba_do_too(layout: str, ep: int, oracle: Oracle) -> None:
    """A hybrid whose further tokens go through attention and through experts, balanced by losses and by biases."""
    modules = {**LAYOUTS[layout]}
    config = {**HYBRID, **FURTHER, "z_loss": 0.01}
    modules["language"] = {"plugin": "hybrid", "config": config, **modules["language"], "ep": ep}
    assert oracle.check(oracle.clear(table(modules, weights="mixed", seed=SEED))) == ""


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        pytest.param(one, way, marks=() if (one, way) in OFTEN else pytest.mark.soak)
        for one, way in product(["zb-h1", "zb-v", "interleaved"], product(["full", "none"], ["full", "optimizer"]))
    ],
)
def test_put_off_recomputed_and_spread(schedule: str, way: tuple[str, str], oracle: Oracle) -> None:
    """First and last stage on two ranks or on one; gradients of weights later, weights gathered as they are used."""
    recompute, spread = way
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2, recompute=recompute, loss_rows=4)}
    settings = scheduled(table(modules, microbatches=2, language=FURTHER), schedule)
    settings["optimizer"] |= SPREAD[spread]
    assert oracle.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("spread", "tied"), [*product(SPREAD, [False, True])])
def test_any_spread(spread: str, tied: bool, oracle: Oracle) -> None:
    """The two copies of the embedding are spread over the lanes of their stages."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = table(modules, microbatches=2, language={**FURTHER, "tied": tied})
    settings["optimizer"] |= SPREAD[spread]
    assert oracle.check(settings) == ""


@pytest.mark.parametrize(
    "frozen", [one if not number else pytest.param(one, marks=pytest.mark.soak) for number, one in enumerate(FROZEN)]
)
def test_frozen_parts(frozen: str, oracle: Oracle) -> None:
    """What is not trained, the copy of the embedding too, stays; the rest learns by both losses."""
    settings = settings_of("pp2")
    settings["modules"]["language"]["frozen"] = FROZEN[frozen]
    assert oracle.check(settings) == ""


@pytest.mark.parametrize(
    "plugin", [one if one == "full" else pytest.param(one, marks=pytest.mark.soak) for one in TOLD]
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_memory_is_told(plugin: str, tied: bool, pool: Pool) -> None:
    """To the byte, the copy of the embedding among it."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = table(modules, microbatches=2, language={**FURTHER, "tied": tied})
    settings["optimizer"] |= PLUGINS[plugin]
    check_memory(settings, pool)


def losses_of(rank: int, settings: Table) -> list[float]:
    """Return the loss and the further one of two steps, with an evaluation between."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    found = []
    for step in (1, 2):
        info = trainer.train(step)
        assert info.losses.keys() == {"next_tokens"}
        found += [info.loss, info.losses["next_tokens"]]
        evaluation = trainer.evaluate(step)
        assert evaluation is not None
        found.append(evaluation.loss)
    return found


def test_the_further_loss_is_told_apart(pool: Pool) -> None:
    """Every rank says the same of it as one process: tensor ranks tell it once. Evaluations pass over it."""
    settings = table({"vision": on(0, 0), "language": on(0, 3, tp=2, cp=2, **SP)}, language=FURTHER)
    settings["optimizer"] |= SPREAD["full"]
    (expected,) = pool.run(1, losses_of, alone(settings))
    loss, further, *_ = expected
    assert 0 < further < loss  # 0.3 of a mean that begins near that of the loss
    for found in pool.run(world_of(settings), losses_of, settings):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.soak
def test_a_run_goes_on(tmp_path: Path, pool: Pool) -> None:
    """Saved after three steps and loaded, it is as if it had not stopped."""
    settings = saving(LAYOUTS["pp2"], tmp_path)
    settings["modules"]["language"]["config"] |= FURTHER
    settings["optimizer"] |= SPREAD["full"]
    pool.run(world_of(settings), run_and_save, settings)
    went_on = pool.run(world_of(settings), run_steps, settings, 4, 6, str(tmp_path))
    straight = pool.run(world_of(settings), run_steps, settings, 1, 6, "")
    check_trajectory(went_on, straight, exactly=True)
