"""The oracle table: every layout gives the loss, every gradient and the weights of one plain process.

Tests of layouts with nothing else chosen beside them are for the soak: every time, each is run by
`test_oracle_distributed` with a schedule, a pass size, a recomputation and a way of spreading.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from cases import Modules, covering, features_of, in_turn
from oracle import Oracle
from tables import table


def on(first: int, last: int, **sizes: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``; dp follows from the other sizes."""
    ranks = list(range(first, last + 1))
    each = sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    return {"ranks": ranks, "dp": len(ranks) // each, **sizes}


def varied(layouts: Mapping[str, Modules], *variations: Any) -> list[Any]:
    """Return parameters (layout, variation): run are as many as show each variation beside each feature of a layout."""
    return covering(
        {(name, one): {f"is {one}", *features_of(modules)} for name, modules in layouts.items() for one in variations},
        shown=map(features_of, layouts.values()),
    )


LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "1+1": {"vision": on(0, 0), "language": on(1, 1)},
    "1 + language pp3": {"vision": on(0, 0), "language": on(1, 3, pp=3)},
    "vision tp2 + language tp2 pp3": {"vision": on(0, 1, tp=2), "language": on(2, 7, tp=2, pp=3)},
    "vision tp2 pp2 + language tp2 pp2": {"vision": on(0, 3, tp=2, pp=2), "language": on(4, 7, tp=2, pp=2)},
    "colocated, same grid": {"vision": on(0, 3, tp=2), "language": on(0, 3, tp=2)},
    "colocated, vision dp4, language tp2 dp2": {"vision": on(0, 3), "language": on(0, 3, tp=2)},
    "colocated, vision tp2, language dp2": {"vision": on(0, 1, tp=2), "language": on(0, 1)},
    "colocated, pipelines in both": {"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)},
    "disjoint 2+2": {"vision": on(0, 1), "language": on(2, 3, tp=2)},
    "disjoint 4+4": {"vision": on(0, 3), "language": on(4, 7, tp=2)},
    "lanes 1 to 2": {"vision": on(0, 0), "language": on(1, 2)},
    "lanes 2 to 1": {"vision": on(0, 1), "language": on(2, 2)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "lanes 4 to 1": {"vision": on(0, 3), "language": on(4, 4)},
    "language tp2": {"vision": on(0, 0), "language": on(1, 2, tp=2)},
    "language tp2 sp": {"vision": on(0, 0), "language": on(1, 2, tp=2, sequence_parallel=True)},
    "language tp3": {"vision": on(0, 0), "language": on(1, 3, tp=3)},
    "language tp3 sp, lanes 3 to 2": {"vision": on(0, 1), "language": on(2, 7, tp=3, sequence_parallel=True)},
    "language pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "language tp2 pp2 dp2": {"vision": on(0, 2), "language": on(0, 7, tp=2, pp=2)},
    "language tp2 sp pp2 dp2": {"vision": on(0, 2), "language": on(0, 7, tp=2, pp=2, sequence_parallel=True)},
    "vision tp2": {"vision": on(0, 1, tp=2), "language": on(2, 2)},
    "vision tp3, more than its lane has rows": {"vision": on(0, 5, tp=3), "language": on(6, 7)},
    "vision pp2": {"vision": on(0, 1, pp=2), "language": on(2, 2)},
    "overlapping": {"vision": on(0, 3), "language": on(2, 5, tp=2)},
    "overlapping, tensor group across": {"vision": on(0, 2, tp=3), "language": on(1, 4, tp=2)},
    "ranks with a gap": {"vision": on(1, 1), "language": {"ranks": [3, 5], "tp": 2, "dp": 1}},
    "language first": {"vision": on(2, 3), "language": on(0, 1, tp=2)},
    "two encoders": {"vision": on(0, 1), "glyph": on(2, 4), "language": on(5, 6, tp=2)},
    "two encoders, one shared rank": {"vision": on(0, 1, tp=2), "glyph": on(1, 2), "language": on(2, 3, pp=2)},
}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "microbatches"), [*product(LAYOUTS, [4, 1])])
def test_layout_never_changes_the_result(layout: str, microbatches: int, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0, 1 or 3 pictures a sample and uneven labels."""
    lanes = LAYOUTS[layout]["language"].get("dp", 1)
    if 24 % (lanes * microbatches):
        microbatches = 2
    assert oracle.check(table(LAYOUTS[layout], microbatches=microbatches)) == ""


SP = {"sequence_parallel": True}
SLICED: dict[str, Modules] = {
    "language cp2": {"vision": on(0, 0), "language": on(1, 2, cp=2)},
    "language cp3 dp2": {"vision": on(0, 3), "language": on(2, 7, cp=3)},
    "language cp4": {"vision": on(0, 0), "language": on(1, 4, cp=4)},
    "language cp2 tp2": {"vision": on(0, 1, tp=2), "language": on(1, 4, cp=2, tp=2)},
    "language cp2 tp2 sp": {"vision": on(0, 1), "language": on(2, 5, cp=2, tp=2, **SP)},
    "language cp2 pp2": {"vision": on(0, 0), "language": on(1, 4, cp=2, pp=2)},
    "language cp2 pp2 tp2 sp, colocated": {"vision": on(0, 7), "language": on(0, 7, cp=2, pp=2, tp=2, **SP)},
    "language cp2, lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 6, cp=2)},
    "two encoders with other lanes into cp2": {"vision": on(0, 1), "glyph": on(2, 4), "language": on(5, 6, cp=2)},
    "vision sp": {"vision": on(0, 1, tp=2, **SP), "language": on(2, 2)},
    "vision sp pp2, language sp": {"vision": on(0, 3, tp=2, pp=2, **SP), "language": on(4, 6, tp=3, **SP)},
    "vision cp2": {"vision": on(0, 1, cp=2), "language": on(2, 3, tp=2)},
    "vision cp2 tp2 sp on the language's cp2 tp2 sp": {
        "vision": on(0, 3, cp=2, tp=2, **SP),
        "language": on(0, 3, cp=2, tp=2, **SP),
    },
    "vision cp3 pp2, language cp2 dp2, overlapping": {"vision": on(0, 5, cp=3, pp=2), "language": on(4, 7, cp=2)},
    "vision sp pp3": {"vision": on(0, 5, tp=2, pp=3, **SP), "language": on(5, 6)},
    "vision cp2 tp2 sp pp2": {"vision": on(0, 7, cp=2, tp=2, pp=2, **SP), "language": on(0, 1, cp=2)},
    "two encoders, one of slices": {"vision": on(0, 1, cp=2), "glyph": on(2, 3), "language": on(3, 4, tp=2, **SP)},
}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "microbatches"), [*product(SLICED, [4, 1])])
def test_rows_may_be_sliced_on_either_side(layout: str, microbatches: int, oracle: Oracle) -> None:
    """Context ranks and sequence parallelism, in the language model and in encoders, change nothing."""
    assert oracle.check(table(SLICED[layout], microbatches=microbatches)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "pictures"), varied(SLICED, "first"))
def test_slices_without_rows_are_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """Nothing hangs or changes where slices, lanes, microbatches or whole steps are empty."""
    assert oracle.check(table(SLICED[layout], microbatches=4, pictures=pictures)) == ""


SOFTMAX = {"experts": 4, "experts_per_token": 2, "dense_layers": 1, "balance_loss": 0.05, "z_loss": 0.01}
SIGMOID = {
    "experts": 4,
    "experts_per_token": 1,
    "expert_intermediate": 21,
    "shared_intermediate": 11,
    "dense_layers": 1,
    "router_score": "sigmoid",
    "router_scale": 1.5,
    "router_normalize": False,
    "expert_bias_rate": 0.01,
    "balance_loss": 0.05,
}
CLEAR_SEEDS: dict[str, tuple[dict[str, Any], int]] = {"softmax": (SOFTMAX, 12), "sigmoid": (SIGMOID, 3)}
"""Seeds with which every row's choice of experts is clear, see `oracle.GAP`."""
EXPERTS: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(1, 1)},
    "lanes alone": {"vision": on(0, 1), "language": on(1, 2)},
    "ep2 over lanes": {"vision": on(0, 0), "language": on(1, 2, ep=2)},
    "ep4 over lanes": {"vision": on(0, 1), "language": on(1, 4, ep=4)},
    "ep2 etp2": {"vision": on(0, 0), "language": on(1, 4, ep=2, etp=2)},
    "etp2 of two copies": {"vision": on(0, 0), "language": on(1, 4, tp=2, etp=2)},
    "ep2 with pp2": {"vision": on(0, 0), "language": on(1, 4, pp=2, ep=2)},
    "ep2 over tensor ranks": {"vision": on(0, 0), "language": on(1, 2, tp=2, ep=2)},
    "ep4 over tensor ranks and lanes": {"vision": on(0, 3), "language": on(0, 3, tp=2, ep=4)},
    "ep2 over tensor ranks with sp": {"vision": on(0, 1), "language": on(1, 4, tp=2, ep=2, **SP)},
    "ep2 over context ranks": {"vision": on(0, 0), "language": on(1, 4, cp=2, ep=2)},
    "ep4 over context and tensor ranks, pp2": {"vision": on(0, 3), "language": on(0, 7, cp=2, tp=2, pp=2, ep=4, **SP)},
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "scores"),
    [
        pytest.param(layout, scores, marks=() if scores == "sigmoid" and number % 2 else pytest.mark.soak)
        for number, layout in enumerate(EXPERTS)
        for scores in CLEAR_SEEDS
    ],
)
def test_experts_may_lie_anywhere(layout: str, scores: str, oracle: Oracle) -> None:
    """Whatever ranks hold them, experts take all their rows; further losses and biases follow the whole batch."""
    language, seed = CLEAR_SEEDS[scores]
    microbatches = 1 if scores == "softmax" else 4
    lanes = EXPERTS[layout]["language"]["dp"]
    if 24 % (lanes * microbatches):
        microbatches = 2
    assert oracle.check(table(EXPERTS[layout], microbatches=microbatches, language=language, seed=seed)) == ""


@pytest.mark.parametrize(("layout", "pictures"), varied(EXPERTS, "first"))
def test_experts_without_rows_are_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """The same where hardly a sample has a picture, so that lanes differ much in their rows."""
    language, seed = CLEAR_SEEDS["softmax"]
    settings = table(EXPERTS[layout], microbatches=2, pictures=pictures, language=language, seed=seed)
    assert oracle.check(oracle.clear(settings)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("pictures", ["none", "first"])
def test_experts_wait_for_each_other_in_lanes_without_pictures_too(pictures: str, oracle: Oracle) -> None:
    """Where the projector alone trains, a lane has a backward to wait in though nothing of its own learns from it."""
    modules = {"vision": on(0, 1, frozen=["encoder"]), "language": on(2, 5, ep=4, frozen=True)}
    language, seed = CLEAR_SEEDS["softmax"]
    settings = table(modules, microbatches=2, pictures=pictures, language=language, seed=seed)
    assert oracle.check(oracle.clear(settings)) == ""


TIED = {
    "pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "tp2 pp2": {"vision": on(0, 0), "language": on(1, 4, pp=2, tp=2)},
    "tp2 sp pp3": {"vision": on(0, 1), "language": on(2, 7, pp=3, tp=2, sequence_parallel=True)},
    "pp2 dp2, colocated": {"vision": on(0, 3), "language": on(0, 3, pp=2)},
    "tp2": {"vision": on(0, 0), "language": on(0, 1, tp=2)},
}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "microbatches"), [*product(TIED, [4, 1])])
def test_tied_embeddings_are_one_parameter(layout: str, microbatches: int, oracle: Oracle) -> None:
    """Input and output embeddings stay one, over stages and tensor ranks."""
    assert oracle.check(table(TIED[layout], microbatches=microbatches, language={"tied": True})) == ""


FROZEN: dict[str, Modules] = {
    "vision, its projector trains": {"vision": on(0, 1, frozen=["encoder"]), "language": on(2, 3, tp=2)},
    "vision over stages, its projector trains": {
        "vision": on(0, 1, pp=2, frozen=["encoder"]),
        "language": on(2, 3, pp=2),
    },
    "all but the projector": {"vision": on(0, 1, frozen=["encoder"]), "language": on(1, 2, pp=2, frozen=True)},
    "the whole encoder": {"vision": on(0, 1, frozen=True), "language": on(1, 2, tp=2)},
    "one of two encoders": {
        "vision": on(0, 0, frozen=True),
        "glyph": on(1, 2),
        "language": on(3, 4, tp=2, sequence_parallel=True),
    },
    "the first language stage": {"vision": on(0, 0, frozen=True), "language": on(1, 2, pp=2, frozen=["embedding"])},
}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "microbatches"), [*product(FROZEN, [4, 1])])
def test_frozen_parts_stay_and_the_others_learn(layout: str, microbatches: int, oracle: Oracle) -> None:
    """What is frozen keeps its weights; gradient passes through it where something behind it learns."""
    assert oracle.check(table(FROZEN[layout], microbatches=microbatches)) == ""


EMPTY: dict[str, Modules] = {
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "colocated": {"vision": on(0, 3), "language": on(0, 3, tp=2)},
    "colocated, same grid": {"vision": on(0, 1), "language": on(0, 1)},
    "vision tp2 pp2, language sp": {"vision": on(0, 3, tp=2, pp=2), "language": on(4, 5, tp=2, sequence_parallel=True)},
    "two encoders": {"vision": on(0, 1, tp=2), "glyph": on(2, 3), "language": on(3, 4, pp=2)},
}


@pytest.mark.each("step")
@pytest.mark.parametrize(("layout", "step"), in_turn(EMPTY, [("first", 4), ("none", 1), ("first", 1), ("none", 4)]))
def test_a_lane_microbatch_or_step_without_pictures_is_ordinary(
    layout: str, step: tuple[str, int], oracle: Oracle
) -> None:
    """Nothing hangs or changes where some lanes, some microbatches or the whole step hold no picture."""
    pictures, microbatches = step
    assert oracle.check(table(EMPTY[layout], microbatches=microbatches, pictures=pictures)) == ""


HEADS: dict[str, Mapping[str, Any]] = {
    "one key-value head": {"kv_heads": 1},
    "three key-value heads": {"kv_heads": 3},
    "as many as heads": {"kv_heads": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 6},
}


@pytest.mark.parametrize(("heads", "split"), in_turn(HEADS, [(3, True), (2, False), (6, False), (2, True)]))
def test_attention_heads_are_split_in_any_number(heads: str, split: tuple[int, bool], oracle: Oracle) -> None:
    """Fewer key-value heads than tensor ranks, numbers that don't divide, biases: all equal one process."""
    tp, sequence_parallel = split
    modules = {"vision": on(0, 0), "language": on(1, tp, tp=tp, sequence_parallel=sequence_parallel)}
    assert oracle.check(table(modules, microbatches=2, language=HEADS[heads])) == ""


FAMILIES: dict[str, Mapping[str, Any]] = {
    "Llama 3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_tokens": 16},
    "Mistral": {"sliding_window": 5, "head_dim": 6},
    "Qwen 2.5": {"qkv_bias": True, "tied": True},
    "Qwen 3": {"query_key_norm": True, "head_dim": 6, "kv_heads": 3},
    "Qwen2-VL": {"qkv_bias": True, "head_dim": 8, "mrope_section": [1, 1, 2]},
}
FAMILY_LAYOUTS: dict[str, Modules] = {
    "language cp2 pp2 tp2 sp": {"vision": on(0, 2), "language": on(0, 7, cp=2, pp=2, tp=2, **SP)},
    "language tp3 sp pp2": {"vision": on(0, 1), "language": on(2, 7, tp=3, pp=2, **SP)},
    "language cp3, two encoders": {"vision": on(0, 0), "glyph": on(1, 1), "language": on(1, 3, cp=3)},
}


@pytest.mark.parametrize(
    ("layout", "family"),
    covering(
        {
            (layout, family): {f"is {family}", *(one for one in features_of(modules) if one.startswith("language"))}
            for layout, modules in FAMILY_LAYOUTS.items()
            for family in FAMILIES
        }
    ),
)
def test_families_of_decoders_may_be_split_alike(layout: str, family: str, oracle: Oracle) -> None:
    """Stretched positions, windows, biases, normed queries and keys, positions in grids: all equal one process."""
    again = {"recompute": ("none", "selective", "full")[len(family) % 3], "loss_rows": 5}
    modules = {name: {**keys, **(again if name == "language" else {})} for name, keys in FAMILY_LAYOUTS[layout].items()}
    assert oracle.check(table(modules, microbatches=2, language=FAMILIES[family])) == ""
