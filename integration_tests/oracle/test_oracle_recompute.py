"""The oracle where backward computes part of the forward again, collectives included, and where it is split as well.

And where layers are compiled, with ``aot_eager``, which takes the graphs and makes no kernels: what the graphs say is
looked at, not a compiler, but in one case.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from cases import Modules, in_turn
from oracle import Oracle
from tables import Table, scheduled, table
from test_oracle import CLEAR_SEEDS, SP, on

from mimo.hooks import ConfigError
from mimo.model.runtime import check_backend

WAYS = ("selective", "full")
LAYOUTS: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "language pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "language tp2 sp": {"vision": on(0, 0), "language": on(1, 2, tp=2, **SP)},
    "language tp3, keys on several ranks": {"vision": on(0, 1), "language": on(2, 4, tp=3)},
    "language cp2": {"vision": on(0, 0), "language": on(1, 2, cp=2)},
    "language cp2 tp2 sp pp2": {"vision": on(0, 1), "language": on(0, 7, cp=2, tp=2, pp=2, **SP)},
    "vision sp": {"vision": on(0, 1, tp=2, **SP), "language": on(2, 2)},
    "vision cp2": {"vision": on(0, 1, cp=2), "language": on(1, 2, tp=2)},
    "vision cp2 tp2 sp pp2": {"vision": on(0, 7, cp=2, tp=2, pp=2, **SP), "language": on(0, 1, cp=2)},
}
EXPERTS: dict[str, Modules] = {
    "ep2 over lanes": {"vision": on(0, 0), "language": on(1, 2, ep=2)},
    "ep2 over tensor ranks with sp": {"vision": on(0, 1), "language": on(1, 4, tp=2, ep=2, **SP)},
    "ep2 etp2, pp2": {"vision": on(0, 0), "language": on(0, 7, pp=2, ep=2, etp=2)},
}
LORA: Mapping[str, Any] = {"lora": {"rank": 2, "targets": ["*"]}}
COMPILED: dict[str, Modules] = {
    "vision tp2 sp full, lanes full": {
        "vision": on(0, 1, tp=2, recompute="full", **SP),
        "language": on(1, 2, recompute="full"),
    },
    "vision cp2 parts frozen, language pp2 selective": {
        "vision": on(0, 1, cp=2, frozen=["encoder"]),
        "language": on(0, 1, pp=2, recompute="selective"),
    },
    "language cp2 lora": {"vision": on(0, 0, **LORA), "language": on(0, 1, cp=2, **LORA)},
    "language cp2 tp2 sp pp2, vision cp2": {
        "vision": on(0, 1, cp=2, recompute="selective"),
        "language": on(0, 7, cp=2, tp=2, pp=2, recompute="selective", **SP),
    },
}


def settings_of(
    modules: Modules, recompute: str, *, schedule: str = "1f1b", microbatches: int = 4, **more: Any
) -> Table:
    """Return settings in which all modules recompute, but those that train nowhere."""
    keys: Mapping[str, Mapping[str, Any]] = {
        name: {**given, "recompute": "none" if given.get("frozen") is True else recompute}
        for name, given in modules.items()
    }
    count = microbatches if 24 % (modules["language"]["dp"] * microbatches) == 0 else 2
    return scheduled(table(keys, microbatches=count, **more), schedule)


@pytest.mark.soak  # every time: in `test_oracle_distributed`, beside all that the table's layouts have
@pytest.mark.parametrize(("layout", "recompute"), [*product(LAYOUTS, WAYS)])
def test_recomputing_changes_nothing(layout: str, recompute: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that keeps all."""
    assert oracle.check(settings_of(LAYOUTS[layout], recompute)) == ""


@pytest.mark.parametrize(
    ("layout", "way"), in_turn(["language cp2", "vision cp2 tp2 sp pp2"], [*product(["first", "none"], WAYS)])
)
def test_ranks_without_rows_recompute_too(layout: str, way: tuple[str, str], oracle: Oracle) -> None:
    """Nobody waits in a repeated collective for a rank that has nothing to repeat."""
    pictures, recompute = way
    assert oracle.check(settings_of(LAYOUTS[layout], recompute, pictures=pictures)) == ""


@pytest.mark.parametrize(("layout", "way"), in_turn(EXPERTS, [*product(CLEAR_SEEDS, WAYS)]))
def test_experts_are_chosen_again_alike(layout: str, way: tuple[str, str], oracle: Oracle) -> None:
    """Rows go to the same experts again; loads, further losses and biases count them once."""
    scores, recompute = way
    language, seed = CLEAR_SEEDS[scores]
    settings = settings_of(EXPERTS[layout], recompute, microbatches=2, language=language, seed=seed)
    assert oracle.check(oracle.clear(settings)) == ""


@pytest.mark.parametrize(
    ("recompute", "how"),
    in_turn(["none", *WAYS], [*product(["zb-h1", "zb-v"], ["language cp2 tp2 sp pp2", "language pp2"])]),
)
def test_a_backward_may_be_split_too(recompute: str, how: tuple[str, str], oracle: Oracle) -> None:
    """Weight gradients that come later add up to the same, also of rows that were computed again."""
    schedule, layout = how
    settings = settings_of(LAYOUTS[layout], recompute, schedule=schedule, language={"mlp_bias": True, "tied": True})
    assert oracle.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize("recompute", WAYS)
def test_a_backward_of_experts_may_be_split_too(recompute: str, oracle: Oracle) -> None:
    """The same for experts over several ranks."""
    language, seed = CLEAR_SEEDS["sigmoid"]
    modules = EXPERTS["ep2 etp2, pp2"]
    settings = settings_of(modules, recompute, schedule="zb-h1", language=language, seed=seed)
    assert oracle.check(oracle.clear(settings)) == ""


@pytest.mark.parametrize(("frozen", "recompute"), in_turn([["encoder"], ["projector"]], WAYS))
def test_parts_that_are_frozen_recompute_what_gradient_passes_through(
    frozen: list[str], recompute: str, oracle: Oracle
) -> None:
    """A frozen language model passes gradient on, a frozen part of an encoder keeps nothing or passes it on."""
    modules = {"vision": on(0, 1, cp=2, frozen=frozen), "language": on(1, 2, tp=2, frozen=["layers", "head"])}
    assert oracle.check(settings_of(modules, recompute)) == ""


def compiled(settings: Table, backend: str = "aot_eager") -> Table:
    """Return settings in which layers are compiled."""
    return {**settings, "run": {**settings["run"], "compile": True, "compile_backend": backend}}


def test_compiled_layers_compute_the_same_beside_all_else(oracle: Oracle) -> None:
    """Experts, LoRA, weights spread over lanes and backwards that are split: one process compiles nothing of it."""
    language, seed = CLEAR_SEEDS["sigmoid"]
    modules = {"vision": on(0, 1, recompute="selective"), "language": on(0, 1, pp=2, recompute="full", **LORA)}
    settings = scheduled(table(modules, microbatches=2, language=language, seed=seed), "zb-h1")
    sharded: Mapping[str, Any] = {**settings["optimizer"], "plugin": "distributed", "shard": "full"}
    assert oracle.check(compiled({**settings, "optimizer": sharded})) == ""


@pytest.mark.soak  # these take each rank seconds
@pytest.mark.parametrize("layout", COMPILED)
def test_compiled_layers_compute_the_same(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that compiles nothing."""
    assert oracle.check(compiled(table(COMPILED[layout], microbatches=2))) == ""


@pytest.mark.soak
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_compiled_layers_compute_with_parameters_that_are_gathered(shard: str, oracle: Oracle) -> None:
    """Those of sharded weights come and go between forward and backward."""
    settings = table({"vision": on(0, 1), "language": on(0, 1)}, microbatches=2)
    sharded: Mapping[str, Any] = {**settings["optimizer"], "plugin": "distributed", "shard": shard}
    assert oracle.check(compiled({**settings, "optimizer": sharded})) == ""


@pytest.mark.soak
@pytest.mark.parametrize("layout", EXPERTS)
def test_compiled_layers_of_experts_compute_the_same(layout: str, oracle: Oracle) -> None:
    """Graphs end before the experts and begin behind, on all ranks at the same place."""
    language, seed = CLEAR_SEEDS["sigmoid"]
    settings = table(EXPERTS[layout], microbatches=2, language=language, seed=seed)
    assert oracle.check(compiled(settings)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["language pp2 zb-h1", "language cp2 tp2 sp pp2 zb-v"])
def test_backwards_of_compiled_layers_may_be_split(how: str, oracle: Oracle) -> None:
    """Weight gradients that come later are those of products inside of graphs."""
    layout, schedule = how.rsplit(maxsplit=1)
    settings = settings_of(LAYOUTS[layout], "selective", schedule=schedule, language={"mlp_bias": True})
    assert oracle.check(compiled(settings)) == ""


@pytest.mark.soak  # a compiler is run for each graph
def test_kernels_compute_the_same(oracle: Oracle) -> None:
    """Those that ``inductor`` makes, where backwards are split and compute some of the forward again."""
    try:
        check_backend("inductor", torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    modules = {"vision": on(0, 0), "language": on(0, 1, pp=2)}
    settings = settings_of(modules, "selective", schedule="zb-h1", microbatches=2, language={"mlp_bias": True})
    assert oracle.check(compiled(settings, "inductor")) == ""
