"""What `hf-decoder` is said to take: against torch's own count of products, and against the formula of `decoder`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from library import saved_elements
from small_models import small
from torch.utils.flop_counter import FlopCounterMode

from mimo.model import DECODER, DecoderConfig, OpCost, Stage
from mimo.model.runtime import LanguageBatch
from mimo_transformers import HF_DECODER, HfDecoderConfig
from mimo_transformers.model.stage import HfStage

LENGTHS = (7, 9)
LABELS = 11


def _cost(config: Any, stage: Stage, recompute: Any = "none", *, spec: Any = HF_DECODER) -> dict[str, OpCost]:
    return dict(spec.flops(config, stage, recompute, LENGTHS, LABELS))


def _total(*costs: dict[str, OpCost]) -> OpCost:
    return sum((work for cost in costs for work in cost.values()), OpCost())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "cohere2", "granite", "stablelm"])
def test_products_with_weights_are_those_that_torch_counts(model_type: str) -> None:
    """Of a whole forward, the head for the rows with labels alone."""
    config = small(model_type)
    stage = HfStage(config, Stage())
    ids = torch.ones(sum(LENGTHS), dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.cat([torch.arange(length) for length in LENGTHS]), lengths=LENGTHS)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        stage.logits(stage(batch, {}, None)[:LABELS])
    # Without products in batches: some releases of the library make angles of positions by them.
    counts = counter.get_flop_counts()["Global"]
    found = sum(count for name, count in counts.items() if name in {torch.ops.aten.mm, torch.ops.aten.addmm})
    assert _total(_cost(config, Stage())).weighted == found
    assert _total(_cost(config, Stage())).weights == sum(one.numel() for one in stage.parameters())


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("stages", [1, 2])
def test_operations_are_those_of_the_decoder_that_reads_the_same_folder(model_type: str, stages: int) -> None:
    """By stage and part: products with weights, those of experts for the rows that they take, and attention."""
    config = small(model_type)
    ours = _as_decoder(config)
    for index in range(stages):
        stage = Stage(index, stages)
        found, wanted = _cost(config, stage), _cost(ours, stage, spec=DECODER)
        assert found.keys() == wanted.keys()
        for part in wanted:
            for name in ("weighted", "inner", "expert_weights"):
                assert getattr(found[part], name) == getattr(wanted[part], name), (index, part, name)


def _as_decoder(config: HfDecoderConfig) -> DecoderConfig:
    (family,) = (one for one in DECODER.hf if one.model_type == config.model_type)
    keys = {"architectures": [family.architecture], **config.library().to_dict()}
    return DecoderConfig(**family.settings(keys))


def test_attention_beside_a_scan_is_counted() -> None:
    """Of Falcon-H1, each layer of which keeps a tensor in memory: half of all pairs of rows."""
    config: Any = small("falcon_h1")
    library = config.library()
    pairs = sum(length**2 for length in LENGTHS) / 2
    assert _cost(config, Stage())["layers"].inner == config.layers * 4 * pairs * library.hidden_size


def test_what_cannot_run_without_storage_is_counted_by_its_weights_alone() -> None:
    """JetMoe's routers say how many rows each expert takes: of its weights each row meets those of the chosen ones."""
    config: Any = small("jetmoe")
    library = config.library()
    layers = _cost(config, Stage())["layers"]
    assert layers.inner == 0
    keys = 2 * library.num_key_value_heads * library.kv_channels
    chosen = library.num_experts_per_tok * (keys + 3 * library.intermediate_size)  # query and output, feed-forward
    outputs = keys + chosen + 2 * library.num_local_experts
    assert layers.weighted == 2 * sum(LENGTHS) * config.layers * library.hidden_size * outputs


def test_a_layer_that_is_computed_again_saves_its_rows_alone() -> None:
    """And its forward counts once more."""
    config = small("llama")
    usual, again = (_cost(config, Stage(), recompute)["layers"] for recompute in ("none", "full"))
    assert again.repeated == usual.forward > 0
    assert again.split == 0
    assert again.copied == sum(LENGTHS) * config.hidden * config.layers
    assert 0 < again.recomputed < usual.split + usual.copied


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "granite"])
def test_layers_save_what_autograd_saves_of_them(model_type: str) -> None:
    """Of all rows, attention's own share included: by a forward that computes."""
    config = small(model_type)
    stage = HfStage(config, Stage())
    ids = torch.ones(sum(LENGTHS), dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.cat([torch.arange(length) for length in LENGTHS]), lengths=LENGTHS)
    layers = _cost(config, Stage())["layers"]
    assert layers.split + layers.copied == pytest.approx(saved_elements(stage, lambda: stage(batch, {}, None)), rel=0.1)
