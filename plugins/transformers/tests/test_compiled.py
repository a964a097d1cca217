"""Compiled layers of the library: ragged batches share graphs, which end at what stays eager alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import test_hf_encoder as towers
import test_hf_images as images
import torch
from small_models import small
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import (
    NO_LABEL,
    Compilation,
    LanguageBatch,
    Moe,
    Part,
    Segments,
    TensorAxis,
    build_part,
    compilation_of,
    gradient_of,
)
from mimo.testing import fork_ranks
from mimo.topology import Grid
from mimo_transformers import HF_DECODER, HF_ENCODER, HF_IMAGES
from mimo_transformers.model.attention import PackedRows
from mimo_transformers.model.drops import BridgedDropout
from mimo_transformers.model.layers import Reading
from mimo_transformers.model.per_sample import PerSample
from mimo_transformers.model.routers import RecordedRouter
from mimo_transformers.model.stage import HfStage

BATCHES = 20
EAGER = {
    "BridgedExperts": Moe.stays_eager,
    "dropout": BridgedDropout.stays_eager,
    "numbers": Reading.stays_eager,
    "router": RecordedRouter.stays_eager,
    "scan": PerSample.stays_eager,
}
"""What layers leave out of their graphs, and why: nothing else ends one."""
DECODERS: Mapping[str, tuple[str, dict[str, Any], int, set[str]]] = {
    "llama": ("llama", {}, 1, set()),
    "windows in some layers": ("gemma3_text", {}, 2, set()),
    "sinks, windows and experts": ("gpt_oss", {}, 5, {"BridgedExperts"}),
    "loads of experts": ("qwen3_moe", {"output_router_logits": True}, 4, {"BridgedExperts", "router"}),
    "scans": ("jamba", {}, 8, {"BridgedExperts", "scan"}),
    "dropout": ("phi", {"resid_pdrop": 0.2}, 3, {"dropout"}),
    "experts in a form of their own": ("jetmoe", {}, 3, {"numbers"}),
}
"""Families with settings, how many graphs their layers take at most, and what ends these."""
ENCODERS: Mapping[str, tuple[Any, Callable[[], Any], int]] = {
    "clip": (HF_ENCODER, lambda: towers.small("clip_vision_model", feature_layer=-2), 4),
    "dinov2": (HF_ENCODER, lambda: towers.small("dinov2"), 2),
    "qwen2_5_vl": (HF_IMAGES, lambda: images.config_of("qwen2_5_vl"), 2),
    "glm4v": (HF_IMAGES, lambda: images.config_of("glm4v"), 2),
    "internvl": (HF_IMAGES, lambda: images.config_of("internvl"), 1),
    "llava": (HF_IMAGES, lambda: images.config_of("llava"), 4),
}
"""Encoders with settings, and the graphs: one image alone has its own, and so has a layer that isn't trained."""


def _build(spec: Any, config: Any, backend: str, **more: Any) -> Part:
    is_language = spec is HF_DECODER
    return build_part(
        spec,
        config,
        grid=Grid(name="language" if is_language else "vision", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        expert_mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")) if is_language else None,
        device=torch.device("cpu"),
        hidden=images.WIDTH,
        compile_backend=backend,
        **more,
    )


def _batches(vocabulary: int) -> Iterator[LanguageBatch]:
    """Yield ragged batches, each with its number of samples, rows and padding."""
    rng = random.Random(3)
    for _ in range(BATCHES):
        lengths = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 5)))
        rows = sum(lengths) + rng.randint(1, 3)
        tokens = (torch.arange(rows) * 5) % vocabulary
        labels = tokens.roll(-1).masked_fill(torch.arange(rows) >= sum(lengths), NO_LABEL)
        yield LanguageBatch.of(tokens, labels, torch.arange(rows), lengths=lengths)


def _gradients(part: Part) -> dict[str, Tensor]:
    return {name: found for name, parameter in part.parameters.items() if (found := gradient_of(parameter)) is not None}


def _read(part: Part, config: Any) -> dict[str, Tensor]:
    module: Any = part.module
    for batch in _batches(config.vocabulary):
        hidden = part.language(batch, {}, None)
        loss = module.losses(hidden, batch.labels).sum()
        (loss + sum(batch.aux_losses.losses.values())).backward()
    return _gradients(part)


def _see(spec: Any, part: Part, config: Any) -> dict[str, Tensor]:
    for numbers in ((0,), (0, 1), (2, 1, 0), (1, 1, 2, 0)):
        pictures = [images.PICTURES[number] for number in numbers]
        items = [spec.prepare(config, picture) for picture in pictures]
        part.encode(items, [spec.measure(picture) for picture in pictures]).square().sum().backward()
    return _gradients(part)


@attrs.frozen
class Compared:
    """What compiled layers do beside the same that run eagerly: graphs, what ends them, and by how much they differ."""

    graphs: int
    breaks: set[str]
    deviation: float


def _compared(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Compared:
    from torch._dynamo.utils import counters

    assert found.keys() == wanted.keys() != set()
    return Compared(
        graphs=counters["stats"]["unique_graphs"],
        breaks={next(part for part, why in EAGER.items() if why in text) for text in counters["graph_break"]},
        deviation=max(float((found[path] - one).norm() / one.norm().clamp_min(1e-3)) for path, one in wanted.items()),
    )


def _compare_decoders(_rank: int, model_type: str, values: dict[str, Any]) -> Compared:
    config = small(model_type)
    config = attrs.evolve(config, values={**config.values, **values})
    eager, part = (_build(HF_DECODER, config, backend) for backend in ("", "aot_eager"))
    return _compared(_read(eager, config), _read(part, config))


def _compare_encoders(_rank: int, name: str) -> Compared:
    spec, make, _ = ENCODERS[name]
    config = make()
    gradients, made = list[dict[str, Tensor]](), list[int]()
    for backend in ("", "aot_eager"):
        part = _build(spec, config, backend)
        with patch.object(Segments, "of", wraps=Segments.of) as making:
            gradients.append(_see(spec, part, config))
        made.append(making.call_count)
    eager, compiled = made
    assert compiled <= eager, "each time the device is waited for"
    return _compared(*gradients)


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "windows in some layers" else pytest.mark.soak) for one in DECODERS],
)
def test_ragged_batches_share_graphs_that_end_at_listed_places_alone(name: str) -> None:
    """Twenty batches of other rows and samples; gradients are those of layers that run eagerly."""
    model_type, values, graphs, breaks = DECODERS[name]
    (found,) = fork_ranks(1, _compare_decoders, model_type, values)
    assert found.graphs <= graphs
    assert found.breaks == breaks
    assert found.deviation <= 1e-5


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "qwen2_5_vl" else pytest.mark.soak) for one in ENCODERS]
)
def test_layers_of_towers_are_whole_graphs(name: str) -> None:
    """Of batches of one to four images, and of such in rows of their own number; likewise.

    Layers that are given the same first rows of images look for the segments once, in graphs too.
    """
    (found,) = fork_ranks(1, _compare_encoders, name)
    assert 1 <= found.graphs <= ENCODERS[name][2]
    assert found.breaks == set()
    assert found.deviation <= 1e-5


def _held_after_a_step_and_a_failure(_rank: int) -> tuple[int, int]:
    """Return how many packed rows there are after a forward and its backward, and after a forward that fails."""
    config = small("qwen3_moe", num_hidden_layers=1)
    config = attrs.evolve(config, values={**config.values, "output_router_logits": True})
    part = _build(HF_DECODER, config, "eager", recompute="full")
    module: Any = part.module
    found = list[int]()
    for fails in (False, True):
        batch = next(_batches(config.vocabulary))
        with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
            module.losses(part.language(batch, {}, None), batch.labels).sum().backward()
        del batch
        gc.collect()
        found.append(sum(isinstance(one, PackedRows) for one in gc.get_objects()))
        module.norm.register_forward_pre_hook(_fail)
    before, after = found
    return before, after


def _fail(*_given: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.soak
@pytest.mark.newest
def test_rows_are_let_go_after_a_step_and_after_a_forward_that_fails() -> None:
    """Also where routers took down logits, whose graphs save what carries the rows for being computed again."""
    assert fork_ranks(1, _held_after_a_step_and_a_failure) == [(0, 0)]


def test_what_reads_numbers_is_named_before_a_run() -> None:
    """By the classes of the library that return tensors alone, so that no graph has a number of each batch in it."""
    stage = HfStage(small("jetmoe"), Stage())
    assert compilation_of(HF_DECODER, stage, name="language") == Compilation(
        layers={"JetMoeDecoderLayer": 4}, eager=dict.fromkeys(("JetMoeAttention", "JetMoeMoE"), Reading.stays_eager)
    )
    assert not any(isinstance(part, Reading) for part in HfStage(small("qwen3_moe"), Stage()).modules())


def test_a_tower_without_a_list_of_layers_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says why, as recomputation does."""
    encoder: Any = HF_ENCODER.build(towers.small("clip_vision_model"), 8)
    monkeypatch.setattr(encoder, "_layers", list)
    with pytest.raises(ConfigError, match="recompute: expected 'none', since the layers of this tower don't follow"):
        HF_ENCODER.recompute["full"](encoder)
    found = compilation_of(HF_ENCODER, encoder, name="vision")
    assert found == Compilation(layers={}, eager=found.eager)
    assert found.eager[""].startswith("the plugin 'hf-encoder' finds no layers: recompute: expected 'none', since")
