"""The most that ranks hold while they train, measured storage by storage, beside what `mimo check` estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import Modules
from jobs import CPU, make_job
from tables import Table, table, world_of
from test_library_resume import vision_of
from test_oracle import SOFTMAX, SP, on

from mimo.hooks import MemoryBytes
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo_transformers import shrink
from mimo_transformers.family import config_of

MOST = 0.1
"""By what share an estimate may differ from what is measured."""
FORWARD = 0.3
"""By what share that of what a forward alone takes may: a layer counts whole, though it frees some of it on its way."""
DECODER = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 300}
EXACT = ("weights", "optimizer")
FULL = {"plugin": "distributed", "shard": "full"}
LAYOUTS: Mapping[str, tuple[Modules, Mapping[str, Any], Mapping[str, Any]]] = {
    "tensor ranks": ({"vision": on(0, 1, tp=2), "language": on(0, 1, tp=2, **SP)}, {}, {}),
    "pipelines": ({"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)}, {}, {}),
    "unlike ones in flight": ({"vision": on(2, 2), "language": on(0, 1, pp=2)}, {}, {}),
    "shards": ({"vision": on(0, 1), "language": on(0, 1)}, FULL, {}),
    "recomputing": ({"vision": on(0, 0, recompute="full"), "language": on(0, 0, recompute="full")}, {}, {}),
    "context ranks": ({"vision": on(0, 0), "language": on(0, 1, cp=2)}, {}, {}),
    "all logits": ({"vision": on(0, 0), "language": on(0, 0)}, {}, {"vocabulary": 3000}),
    "few rows of logits": ({"vision": on(0, 0), "language": on(0, 0, loss_rows=16)}, {}, {"vocabulary": 3000}),
    "experts": ({"vision": on(0, 0), "language": on(0, 1, ep=2)}, {}, SOFTMAX),
}
"""Modules, keys of the optimizer, and keys of the decoder."""


def settings_of(layout: str) -> Table:
    """Return settings whose samples are about equally long, and whose activations are most of what is held."""
    modules, optimizer, decoder = LAYOUTS[layout]
    settings = table(modules, microbatches=3, pictures="digits", language={**DECODER, **decoder})
    settings["optimizer"] |= optimizer
    return measured(settings)


def measured(settings: Table) -> Table:
    """Return settings of a step whose memory is measured, with samples that are about equally long."""
    if "vision" in settings["modules"]:
        settings["modules"]["vision"]["config"] |= {"width": 48, "intermediate": 96}
    settings["run"] |= {"device": "cpu", "steps": 1}
    settings["logging"] = {"memory": True}
    settings["data"] |= {"words": [28, 36], "side": 16}
    return settings


def measure(rank: int, settings: Table) -> Mapping[str, MemoryBytes]:
    """Return what the metrics of the only step say of memory."""
    return Trainer(make_job(settings), rank=rank, device=CPU).train(1).memory


def of_library(settings: Table, model_type: str) -> Table:
    """Return settings with the library's own language model and tower in the place of ours."""
    values = shrink(config_of(model_type, {}), vocab_size=0)
    del values["vocab_size"]
    values |= {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
    config = {"model_type": model_type, "values": values}
    settings["modules"]["language"] |= {"plugin": "hf-decoder", "config": config, "sequence_parallel": False}
    tower = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    tower |= {"image_size": 16, "patch_size": 2}
    config = {"model_type": "siglip_vision_model", "values": tower}
    settings["modules"]["vision"] |= {"plugin": "hf-encoder", "config": config}
    return settings


DRAWERS: Mapping[str, tuple[Modules, Mapping[str, Any], Mapping[str, Any]]] = {
    "one rank": ({"vision": on(0, 0), "language": on(0, 0), "drawer": on(0, 0)}, {}, {}),
    "a rank of its own": ({"vision": on(0, 0), "language": on(0, 0), "drawer": on(1, 1)}, {}, {}),
    "lanes": ({"vision": on(0, 1), "language": on(0, 1), "drawer": on(0, 1)}, FULL, {}),
    "tensor ranks": ({"vision": on(0, 0), "language": on(0, 1, tp=2, **SP), "drawer": on(0, 1, tp=2)}, {}, {}),
    "recomputing": (
        {"vision": on(0, 0), "language": on(0, 0), "drawer": on(1, 1, recompute="full")},
        {},
        {"reads": "own", "queries": 5},
    ),
    "passes over 3": ({"language": on(0, 0), "drawer": on(1, 1, batch_factor=3)}, {}, {}),
}
"""Modules, keys of the optimizer, and keys of the generator."""


def of_drawer(layout: str) -> Table:
    """Return settings of a model that makes a picture for each sample, and then reads it if it has an encoder."""
    modules, optimizer, flow = DRAWERS[layout]
    config = {"height": 16, "width": 16, "channels": 1, "patch": 2, "hidden": 48, "layers": 3, "heads": 4}
    drawer = {"plugin": "flow", "fed_by": "language", "config": {**config, "intermediate": 96, **flow}}
    modules = {**modules, "drawer": {**modules["drawer"], **drawer}}
    roles = {"image": ["both" if "vision" in modules else "output"]}
    settings = measured(table(modules, microbatches=3, pictures="digits", language=DECODER, roles=roles))
    settings["optimizer"] |= optimizer
    return settings


def check(settings: Table, pool: Pool) -> None:
    """Refuse estimates of a rank that are off by more than a tenth, though activations are most of what they may be."""
    first, *others = pool.run(world_of(settings), measure, settings)
    assert all(other == first for other in others)
    for module, memory in first.items():
        held, estimated = ({**dict.fromkeys(EXACT, 0), **one} for one in (memory.held, memory.estimated))
        assert {kind: held[kind] for kind in EXACT} == {kind: estimated[kind] for kind in EXACT}
        if "optimizer" in memory.held:
            assert memory.rank_held == pytest.approx(memory.rank_estimated, rel=MOST), (module, memory)
        else:
            passing = held["working"] + held["activations"]
            assert passing == pytest.approx(estimated["activations"], rel=FORWARD), (module, memory)
    activations = sum(memory.estimated["activations"] for memory in first.values())
    assert activations > 4 * MOST * max(memory.rank_held or 0 for memory in first.values())


@pytest.mark.each("layout")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimates_are_what_ranks_hold(layout: str, pool: Pool) -> None:
    """All of it within a tenth; weights and the optimizer's state to the byte."""
    check(settings_of(layout), pool)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "model_type"),
    [
        ("recomputing", "llama"),
        ("tensor ranks", "llama"),
        pytest.param("context ranks", "llama", marks=pytest.mark.soak),
        pytest.param("shards", "gemma3_text", marks=pytest.mark.soak),
        pytest.param("experts", "qwen3_moe", marks=pytest.mark.soak),
    ],
)
def test_estimates_of_the_librarys_models_are_what_ranks_hold(layout: str, model_type: str, pool: Pool) -> None:
    """By what autograd saves of a row, and for a tower by the shapes of its weights."""
    check(of_library(settings_of(layout), model_type), pool)


IMAGES: Mapping[str, tuple[str, Modules]] = {
    "tiles": ("llava_next", {"vision": on(1, 1), "language": on(0, 0)}),
    "recomputed tiles": ("llava_onevision", {"vision": on(0, 0, recompute="full"), "language": on(0, 0)}),
    "windows of any size": ("qwen2_5_vl", {"vision": on(0, 0), "language": on(0, 0)}),
    "recomputed under a mask over all": ("lighton_ocr", {"vision": on(1, 1, recompute="full"), "language": on(0, 0)}),
    "tensor ranks": ("gemma3", {"vision": on(0, 1, tp=2), "language": on(0, 1, tp=2, **SP)}),
}
"""Published models and modules."""


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.soak] if one == "tiles" else []) for one in IMAGES]
)
def test_estimates_of_published_towers_are_what_ranks_hold(case: str, pool: Pool) -> None:
    """By what autograd saves of images, at their own sizes or in tiles."""
    name, modules = IMAGES[case]
    settings = measured(table(modules, microbatches=3, pictures="digits", language=DECODER))
    vision = vision_of(name, DECODER["hidden"])
    settings["data"]["side"] = 48
    if "longest" in vision["config"]["images"]:  # large ones, of which masks are much of what is held
        settings["data"]["side"] = vision["config"]["images"]["longest"] = 128
    tower = vision["config"]["values"]["vision_config"]
    tower |= {"hidden_size": 64, "intermediate_size": 128, "depth" if "depth" in tower else "num_hidden_layers": 4}
    if "head_dim" in tower:
        tower["head_dim"] = tower["hidden_size"] // tower["num_attention_heads"]
    settings["modules"]["vision"] = {**modules["vision"], **vision}
    check(settings, pool)


@pytest.mark.parametrize("layout", DRAWERS)
def test_estimates_of_generators_are_what_ranks_hold(layout: str, pool: Pool) -> None:
    """By their formula, of pictures that are made and then read."""
    check(of_drawer(layout), pool)


@pytest.mark.parametrize("tower", [on(1, 1), on(1, 2, tp=2), on(1, 2, pp=2)])
def test_estimates_of_a_frozen_tower_are_about_what_ranks_hold(tower: Mapping[str, Any], pool: Pool) -> None:
    """What its forward takes while it runs."""
    modules = {"vision": {**tower, "frozen": True}, "language": on(0, 0)}
    check(measured(table(modules, microbatches=3, pictures="digits", language=DECODER)), pool)


TAUGHT: Mapping[str, tuple[Modules, Mapping[str, Any]]] = {
    "differences": ({"teacher": on(1, 1), "language": on(0, 0)}, {"top_k": 0, "hidden": "mse"}),
    "angles": ({"teacher": on(1, 2, tp=2), "language": on(0, 0)}, {"top_k": 0, "hidden": "cosine"}),
    "ids too": ({"teacher": on(1, 1), "language": on(0, 0)}, {"top_k": 5, "hidden": "mse"}),
    "context ranks": ({"teacher": on(2, 3, cp=2), "language": on(0, 1, cp=2)}, {"top_k": 0, "hidden": "mse"}),
    "lanes": ({"teacher": on(0, 1), "language": on(2, 3)}, {"top_k": 5}),
}
"""Modules, and how they are taught."""
WIDE: Mapping[str, Any] = {"hidden": 96, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocabulary": 50}


@pytest.mark.parametrize("layout", TAUGHT)
def test_estimates_of_what_teachers_hold_and_say_are_what_ranks_hold(layout: str, pool: Pool) -> None:
    """Of a teacher what its forward takes, and of a student its rows and the teacher's, which are compared in fp32."""
    modules, distil = TAUGHT[layout]
    modules = {**modules, "teacher": {**modules["teacher"], "distil": distil, "config": WIDE}}
    check(measured(table(modules, microbatches=3, language=WIDE)), pool)


def test_estimates_of_a_student_of_several_teachers_are_what_ranks_hold(pool: Pool) -> None:
    """Whose hidden rows are much of what it keeps."""
    teachers = {
        f"teacher{rank}": {**on(rank, rank, distil={"top_k": 0, "hidden": "mse"}), "config": WIDE}
        for rank in range(1, 6)
    }
    check(measured(table({**teachers, "language": on(0, 0)}, microbatches=3, language=WIDE)), pool)
