"""The oracle over LoRA and freezing by pattern: adapted encoders and language models in every kind of layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from cases import Modules, in_turn
from jobs import make_job
from oracle import GAP, Oracle, Outcome, differences, run_layout
from tables import EVEN_EPS, Table, alone, scheduled, table, world_of
from test_oracle import SOFTMAX, SP, on
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_mamba import SEED
from torch import nn
from truth import Truth, run_plain

from mimo.hooks import ConfigError
from mimo.model import lora_linear
from mimo.model.runtime import LowRank
from mimo.testing import Pool

VISION: Mapping[str, Any] = {"rank": 2, "alpha": 3.0, "targets": ["layers.*", "projector.*"]}
LANGUAGE: Mapping[str, Any] = {"rank": 3, "alpha": 6.0, "targets": ["*.attention.*", "layers.[12].mlp.*", "head"]}
EVERYTHING: Mapping[str, Any] = {"rank": 2, "targets": ["*"]}
LAYOUTS: dict[str, Modules] = {
    "vision tp2, language tp3": {"vision": on(0, 1, tp=2), "language": on(2, 4, tp=3)},
    "vision tp2 sp, language tp3 sp": {"vision": on(0, 1, tp=2, **SP), "language": on(2, 4, tp=3, **SP)},
    "vision pp2, language pp3": {"vision": on(0, 1, pp=2), "language": on(2, 4, pp=3)},
    "vision cp2, language cp2 tp2 sp": {"vision": on(0, 1, cp=2), "language": on(0, 3, cp=2, tp=2, **SP)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
}
OPTIMIZERS: dict[str, Mapping[str, Any]] = {
    "adamw": {},
    "distributed": {"plugin": "distributed", "shard": "full"},
    "hybrid": {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 2048, "staging_bytes": 0},
}


def adapted(modules: Modules, *, vision: Any = VISION, language: Any = LANGUAGE, **more: Any) -> Table:
    """Return settings whose modules are adapted."""
    settings = table(modules, **more)
    for name, lora in (("vision", vision), ("language", language)):
        if lora is not None:
            settings["modules"][name]["lora"] = dict(lora)
    return settings


@contextmanager
def drawn() -> Iterator[None]:
    """Draw ``up`` too, from seed and name: where it is zero, ``down`` would have no gradient in the first step."""

    def draw(beside: LowRank) -> None:
        nn.init.normal_(beside.down, std=0.2)
        nn.init.normal_(beside.up, std=0.2)

    with mock.patch.object(LowRank, "reset_parameters", draw):
        yield


def run_adapted(rank: int, settings: Table) -> Outcome:
    """Train a layout."""
    with drawn():
        return run_layout(rank, settings)


def run_plainly(rank: int, settings: Table, *, nudged: bool = False) -> Truth:
    """Train by a plain loop."""
    with drawn():
        return run_plain(rank, settings, nudged=nudged)


def check(pool: Pool, settings: Table) -> str:
    """Return the differences of a layout from one process, a line each."""
    (truth,) = pool.recall(1, run_plainly, alone(settings))
    assert isinstance(truth, Truth)
    assert truth.gap >= GAP, truth.gap
    assert any(lora_linear(name) for name in truth.gradients)
    assert all(float(gradient.norm()) for gradient in truth.gradients.values())
    found = pool.run(world_of(settings), run_adapted, settings)
    return "\n".join(differences(truth, found))


@pytest.mark.parametrize(("layout", "microbatches"), in_turn(LAYOUTS, [2, 1]))
def test_layout_never_changes_what_is_adapted(layout: str, microbatches: int, pool: Pool) -> None:
    """Loss, gradients and weights equal one process where encoder and language model learn by LoRA alone."""
    assert check(pool, adapted(LAYOUTS[layout], microbatches=microbatches)) == ""


def mixed(layout: Modules, **more: Any) -> Table:
    """Return settings of a hybrid with experts, whose every linear is adapted."""
    settings = adapted(layout, vision=None, language=EVERYTHING, seed=SEED, eps=EVEN_EPS, **more)
    settings["modules"]["language"] |= {"plugin": "hybrid", "config": HYBRID}
    return settings


MIXED: dict[str, Modules] = {
    "tp2 ep2": {"vision": on(0, 1), "language": on(0, 1, tp=2, ep=2)},
    "tp3 sp pp2": {"vision": on(0, 0), "language": on(0, 5, tp=3, pp=2, **SP)},
}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "microbatches"), in_turn(MIXED, [2, 1]))
def test_linears_of_mamba_and_of_experts_are_adapted(layout: str, microbatches: int, pool: Pool) -> None:
    """Each expert by its own; the encoder trains whole."""
    assert check(pool, mixed(MIXED[layout], microbatches=microbatches)) == ""


CUT: dict[str, Modules] = {
    "etp2 of two copies": {"vision": on(0, 0), "language": on(1, 4, tp=2, etp=2)},
    "ep2 etp2 over lanes": {"vision": on(0, 0), "language": on(1, 4, ep=2, etp=2)},
    "ep2 etp2 of two copies": {"vision": on(0, 0), "language": on(0, 7, tp=2, ep=2, etp=2, **SP)},
}
CLEAR_SEED = 2
"""With which each row's choice of experts is clear, see `oracle.GAP`, where all linears of the decoder are adapted."""


@pytest.mark.parametrize(("layout", "optimizer"), in_turn(CUT, ["distributed", "adamw", "hybrid"]))
def test_experts_are_adapted_that_are_cut(layout: str, optimizer: str, pool: Pool) -> None:
    """What is whole on the ranks of an expert gets its gradient from all of them, and counts once in the norm."""
    settings = adapted(CUT[layout], vision=None, language=EVERYTHING, seed=CLEAR_SEED, microbatches=2)
    settings["modules"]["language"]["config"] |= SOFTMAX
    settings["optimizer"] |= OPTIMIZERS[optimizer]
    assert check(pool, settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "optimizer"), in_turn(CUT, ["adamw", "distributed"]))
def test_experts_of_a_hybrid_are_adapted_that_are_cut(layout: str, optimizer: str, pool: Pool) -> None:
    """Beside Mamba layers, which tensor ranks cut."""
    settings = mixed(CUT[layout], microbatches=2)
    settings["optimizer"] |= OPTIMIZERS[optimizer]
    assert check(pool, settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.soak)])
def test_their_weight_gradients_are_put_off_too(schedule: str, pool: Pool) -> None:
    """Where a schedule splits backwards."""
    settings = adapted({"vision": on(0, 0), "language": on(0, 1, pp=2)}, microbatches=2)
    assert check(pool, scheduled(settings, schedule)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["distributed", pytest.param("hybrid", marks=pytest.mark.soak)])
def test_optimizers_spread_them_over_lanes(optimizer: str, pool: Pool) -> None:
    """With weights of which some are frozen and some are not; key-value heads are fewer than tensor ranks."""
    settings = adapted({"vision": on(0, 1), "language": on(0, 5, tp=3)}, language={**LANGUAGE, "targets": ["*"]})
    settings["optimizer"] |= OPTIMIZERS[optimizer]
    assert check(pool, settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.soak), "full"])
def test_layers_are_computed_again(recompute: str, pool: Pool) -> None:
    """Backward adds the same again."""
    settings = adapted({"vision": on(0, 0), "language": on(0, 1, tp=2)}, language=EVERYTHING)
    settings["modules"]["language"]["recompute"] = recompute
    assert check(pool, settings) == ""


FROZEN: dict[str, tuple[Any, Any]] = {
    "of the last stage alone": (None, {**EVERYTHING, "targets": ["layers.2.*"]}),
    "of the first stage alone": (None, {**EVERYTHING, "targets": ["layers.0.mlp.up"]}),
    "of the encoder's last stage": ({**VISION, "targets": ["layers.2.mlp.*"]}, None),
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.soak if "first" in one else ()) for one in FROZEN]
)
def test_stages_without_what_is_trained_run_no_backward(case: str, pool: Pool) -> None:
    """Only where something before or in a stage is trained, a gradient comes by."""
    vision, language = FROZEN[case]
    layout = {"vision": on(0, 2, pp=3), "language": on(3, 5, pp=3)}
    settings = adapted(layout, vision=vision, language=language, microbatches=2)
    settings["modules"]["vision"] |= {} if vision else {"frozen": True}
    settings["modules"]["language"] |= {} if language else {"frozen": ["layers.[01].*", "embedding", "*norm.weight"]}
    assert check(pool, settings) == ""


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("distributed", marks=pytest.mark.soak)])
def test_stages_may_be_frozen_by_pattern(optimizer: str, oracle: Oracle) -> None:
    """Of three stages the middle one wholly, and of others some."""
    settings = table({"vision": on(0, 1, pp=2), "language": on(2, 4, pp=3)}, microbatches=2)
    settings["modules"]["vision"]["frozen"] = ["encoder", "projector.*.bias"]
    settings["modules"]["language"]["frozen"] = ["layers.1.*", "layers.[02].mlp.*", "embedding"]
    settings["optimizer"] |= OPTIMIZERS[optimizer]
    job = make_job(settings)
    assert job.module("language").trains == (True, False, True)
    assert job.module("vision").trains == (False, True)
    assert oracle.check(settings) == ""


def test_where_no_gradient_reaches_a_router_there_is_none(pool: Pool) -> None:
    """Its balance is told, and nothing is trained by it."""
    settings = mixed({"vision": on(0, 0, frozen=True), "language": on(0, 1, pp=2)})
    settings["modules"]["language"]["lora"]["targets"] = ["head"]
    assert check(pool, settings) == ""


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"lora": {"rank": 2, "targets": ["layers.*.attn"]}},
            "modules.language.lora.targets: expected patterns of the paths of linears inside language, got ",
        ),
        ({"lora": {"rank": 0, "targets": ["*"]}}, "modules.language.lora.rank: expected 1 to 1048576, got 0."),
        (
            {"frozen": ["layers.*", "haed"]},
            "modules.language.frozen: expected parts of language model 'decoder' ('embedding', ",
        ),
        (
            {"lora": {"rank": 2, "targets": ["*"]}, "frozen": ["layer.*"]},
            "modules.language.frozen: expected parts of language model 'decoder' ('embedding', ",
        ),
    ],
    ids=["target", "rank", "part", "pattern"],
)
def test_settings_that_name_nothing_are_refused(keys: Mapping[str, Any], text: str) -> None:
    """Before launch, by their path."""
    with pytest.raises(ConfigError) as refused:
        make_job(table({"vision": on(0, 0), "language": on(0, 0, **keys)}))
    assert str(refused.value).startswith(text)
