"""What is drawn for the oracle: nearly all of it can be run, and whatever layouts may have comes up in what is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import features_of
from drawing import CLIPS, ENCODERS, draw
from drawn import BALANCES, assess, describe, generator, refusal
from oracle import Oracle, Outcome, Piece, differences
from tables import SAMPLES, SCHEDULES, Table, lanes_of
from test_oracle_lora import run_adapted, run_plainly
from torch import Tensor
from truth import Truth

from mimo.testing import Pool

SEED, COUNT = 2, 40
RUN = (
    (3, 2, frozenset({"compiled", "chunked loss"})),  # on two ranks, as each takes seconds to compile
    (2, 6, frozenset({"steps by tokens", "chunked loss", "moments bf16"})),
)
"""Of a seed and so many ranks, the first settings that have these features are compared with the plain process every
time, the first one by samples; `drawn` compares any number."""
WANTED = {
    *(f"{name} {axis}" for name in (*ENCODERS, "language") for axis in ("pp", "dp", "cp", "tp", "sequence_parallel")),
    *(f"flow {axis}" for axis in ("pp", "dp", "cp", "tp", "sequence_parallel")),
    *("language ep", "language etp", "disjoint", "colocated", "overlapping", "a rank without a module"),
    *("2 modules", "3 modules", "4 modules", "chunks 2", "batch_factor 3", "prefetch True"),
    *("a lens", "an encoder of two modules", "a language model a step ahead"),
    *("recompute selective", "recompute full", "several microbatches", "texts are cut"),
    *("decoder", "hybrid", "tied", "experts", "next_tokens", "next_tokens_pattern", "pictures of their own sizes"),
    *("all frozen", "parts frozen", "patterns frozen", "lora", "lora beside all that trains", "lora of experts"),
    *(f"pictures {how}" for how in ("mixed", "many", "first", "digits", "none")),
    *(f"weights {how}" for how in ("none", "mixed", "first")),
    *(f"balance {how}" for how in ("cost", "count")),
    *(f"longer ones: {how}" for how in ("cut", "drop")),
    "steps by tokens",
    *("compiled", "chunked loss", "moments fp32", "moments bf16"),
    *(f"spread {shard}" for shard in ("optimizer", "gradients", "full")),
    *(f"stepped by {plugin}" for plugin in ("adamw", "distributed", "cpu-offload")),
    *(str(rates) for rates in CLIPS),
    *(str(schedule) for schedule in SCHEDULES.values()),
}


@pytest.fixture(scope="module")
def runs() -> list[Table]:
    """Settings of a seed that are not refused."""
    drawn = [draw(generator(SEED, index)) for index in range(COUNT)]
    return [settings for settings in drawn if refusal(settings) is None]


@pytest.mark.soak
def test_most_of_what_is_drawn_is_run(runs: list[Table]) -> None:
    """No more than a tenth is refused by its settings."""
    assert len(runs) >= 0.9 * COUNT


@pytest.mark.soak
def test_all_that_layouts_may_have_comes_up(runs: list[Table]) -> None:
    """In settings that are run."""
    assert WANTED - set().union(*map(features, runs)) == set()


@pytest.mark.each("balance")
@pytest.mark.parametrize(("which", "balance"), [*zip(range(len(RUN)), BALANCES, strict=True)])
def test_some_of_what_is_drawn_equals_one_process(which: int, balance: str, pool: Pool, tmp_path: Path) -> None:
    """With samples placed by cost and by count."""
    oracle = Oracle(pool, tmp_path, plain=run_plainly, layout=run_adapted)
    settings = first_with(*RUN[which])
    settings, wrong = assess(oracle, {**settings, "data": {**settings["data"], "balance": balance}})
    assert not wrong, f"{describe(settings)}: {wrong}"


def first_with(seed: int, world: int, wanted: frozenset[str]) -> Table:
    """Return the first settings of a seed on so many ranks that have these features and are not refused."""
    for number in range(COUNT):
        settings = draw(generator(seed, number), world=world)
        if wanted <= features(settings) and refusal(settings) is None:
            return settings
    raise AssertionError(f"none of {COUNT} settings that are drawn has all of {sorted(wanted)}")


def test_rounding_explains_what_it_changes_alone() -> None:
    """Of a gradient that weights beside move, as much as layouts do; not more of it, nor anything of another one."""
    zero, moved = torch.zeros(4), torch.full((4,), 1e-4)
    truth = truth_of(ones := {"a.weight": torch.ones(4), "b.weight": torch.ones(4)}, ones)
    nudged = truth_of({**ones, "a.weight": ones["a.weight"] + moved}, ones)

    def lines_of(a: Tensor, b: Tensor, nudged: Truth | None) -> list[str]:
        gradients = {"a.weight": Piece.of(1 + a), "b.weight": Piece.of(1 + b)}
        weights = {name: Piece.of(value) for name, value in ones.items()}
        found = Outcome(losses=[1.0], terms={}, norms=[1.0], gradients=gradients, weights=weights)
        return [line.partition(":")[0] for line in differences(truth, [found], nudged=nudged)]

    assert lines_of(2 * moved, zero, None) == ["gradient of a.weight"]
    assert lines_of(2 * moved, zero, nudged) == []
    assert lines_of(6 * moved, zero, nudged) == ["gradient of a.weight"]
    assert lines_of(2 * moved, 2 * moved, nudged) == ["gradient of b.weight"]


def truth_of(gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> Truth:
    """Return a truth of these."""
    return Truth(losses=[1.0], terms={}, norms=[1.0], gradients=gradients, weights=weights, gap=1.0)


def features(settings: Table) -> set[str]:
    """Return what can be told of settings."""
    modules, optimizer, language = settings["modules"], settings["optimizer"], settings["modules"]["language"]
    ranks = {rank for keys in modules.values() for rank in keys["ranks"]}
    has = {
        "a rank without a module": len(ranks) <= max(ranks),
        "several microbatches": settings["run"].get("micro_batch", SAMPLES) * lanes_of(language) < SAMPLES,
        "steps by tokens": "batch_tokens" in settings["run"],
        "compiled": settings["run"].get("compile", False),
        "chunked loss": language.get("loss_rows", 0) > 0,
        "texts are cut": settings["data"]["max_tokens"] < SAMPLES + 1,
        "pictures of their own sizes": "native" in str(modules),
        "a language model a step ahead": language.get("prefetch", False),
        "a lens": any(name.startswith("lens") for name in modules),
        "an encoder of two modules": any(isinstance(keys.get("feeds"), list) for keys in modules.values()),
    }
    return {
        *features_of(modules),
        *(what for what, comes_up in has.items() if comes_up),
        *(key for key, value in language["config"].items() if value),
        *(feature for keys in modules.values() for feature in told_of(keys)),
        language["plugin"],
        f"pictures {settings['data']['pictures']}",
        f"weights {settings['data']['weights']}",
        f"balance {settings['data']['balance']}",
        f"longer ones: {settings['data'].get('longer')}",
        f"spread {optimizer.get('shard')}",
        f"stepped by {optimizer.get('plugin', 'adamw')}",
        f"moments {optimizer.get('moments', 'fp32')}",
        *(str(rates) for rates in CLIPS if all(optimizer.get(key) == value for key, value in rates.items())),
        str(settings["schedule"]),
    }


def told_of(keys: Mapping[str, Any]) -> set[str]:
    """Return what can be told of a module."""
    frozen, lora = keys.get("frozen", []), keys.get("lora", {})
    has = {
        "all frozen": frozen is True,
        "parts frozen": frozen not in (True, False) and not all("." in entry or "*" in entry for entry in frozen),
        "patterns frozen": "*" in str(frozen),
        "lora": bool(lora),
        "lora beside all that trains": bool(lora) and frozen is False,
        "lora of experts": "expert" in str(lora) or (lora.get("targets") == ["*"] and keys.get("ep", 1) > 1),
    }
    if keys["plugin"] == "flow":
        has |= {f"flow {axis}": keys.get(axis, 1) > 1 for axis in ("pp", "dp", "cp", "tp")}
        has["flow sequence_parallel"] = keys.get("sequence_parallel", False)
    passes = {f"{key} {keys.get(key)}" for key in ("chunks", "batch_factor", "prefetch", "recompute")}
    return passes | {what for what, comes_up in has.items() if comes_up}
