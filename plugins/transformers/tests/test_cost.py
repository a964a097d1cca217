"""What `hf-decoder` is said to take: against torch's own count of products, and against the formula of `decoder`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from library import saved_elements
from small_models import small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mimo.model import DECODER, DecoderConfig, OpCost, Stage
from mimo.model.runtime import LanguageBatch
from mimo_transformers import HF_DECODER, HfDecoderConfig
from mimo_transformers.cost.decoder import _counted
from mimo_transformers.model import attention
from mimo_transformers.model.stage import HfStage

pytestmark = pytest.mark.newest
LENGTHS = (7, 9)
LABELS = 11


def _cost(
    config: Any, stage: Stage, recompute: Any = "none", *, spec: Any = HF_DECODER, lengths: Any = LENGTHS
) -> dict[str, OpCost]:
    return dict(spec.flops(config, stage, recompute, lengths, LABELS))


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


def test_attention_and_the_scan_beside_it_are_counted_by_hand() -> None:
    """Of Falcon-H1: half of all pairs of rows, and of the scan all pairs in chunks, states of these, and of all."""
    config: Any = small("falcon_h1")
    library = config.library()
    pairs = sum(length**2 for length in LENGTHS) / 2
    width, state, chunk = library.mamba_d_ssm, library.mamba_d_state, library.mamba_chunk_size
    heads, scan = library.mamba_n_heads, 0
    for count in (-(-length // chunk) for length in LENGTHS):
        scan += 2 * count * chunk**2 * (heads * state + width)
        scan += 2 * (2 * count * chunk + (count + 1) ** 2) * width * state
    found = _cost(config, Stage())["layers"].inner
    assert found == pytest.approx(config.layers * (4 * pairs * library.hidden_size + scan))


LONGER = (40, 150)


def _halved(query: Tensor, key: Tensor, value: Tensor, _segments: Any, **_others: Any) -> Tensor:
    """Return something of the shape of attention, made by half of its products: as causal attention is counted."""
    found = []
    for one in zip(*(x.split(LONGER) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (one[0], one[1][::2], one[2][::2]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        found.append((q @ k.transpose(1, 2) @ v).transpose(0, 1))
    return torch.cat(found)


class _Sums(TorchDispatchMode):
    """Counts sums over products that are made element by element, of tensors of which one is smaller."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.operations = 0
        self._product: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        found, before = func(*args, **(kwargs or {})), self._product
        self._product = None
        if func is torch.ops.aten.mul.Tensor:
            if args[0] is before or any(isinstance(one, Tensor) and one.numel() < found.numel() for one in args):
                self._product = found
        elif func is torch.ops.aten.sum.dim_IntList and args[0] is before:
            self.operations += 2 * before.numel()
        return found


MIXED: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {},
    "bamba": {},
    "nemotron_h": {},
    "qwen3_next": {},
    "minimax": {},
    "kimi_linear": {},
    "jamba": {},
    "jetmoe": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
}
"""Families whose layers mix rows by more than attention, or have experts in it, and changes of the small model."""
ALWAYS = ("nemotron_h", "qwen3_next", "jetmoe", "lfm2")
"""Scans, linear attention, experts in attention, convolutions; the soak has the others."""


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.soak) for one in MIXED],
)
def test_operations_of_scans_are_those_that_torch_counts(model_type: str) -> None:
    """Of a forward that computes, and what scans save: products of matrices, in sums and solved systems too."""
    config = small(model_type, **MIXED[model_type])
    stage: Any = HfStage(config, Stage())
    ids = torch.ones(sum(LONGER), dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.cat([torch.arange(length) for length in LONGER]), lengths=LONGER)
    others = {
        torch.ops.aten.linalg_solve_triangular: lambda a, b, *_, **__: math.prod(b) * a[-1],
        torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * math.prod(a) * b[-1],
    }
    counter = FlopCounterMode(display=False, custom_mapping=others)
    with patch.object(attention, "attend", _halved), counter, _Sums() as sums:
        stage(batch, {}, None)
    found = _cost(config, Stage(), lengths=LONGER)["layers"]
    assert found.forward == pytest.approx(counter.get_total_flops() + sums.operations, rel=0.1)
    saved = saved_elements(stage, lambda: stage(batch, {}, None))
    assert found.split + found.copied == pytest.approx(saved, rel=0.1)


def test_scans_of_other_lengths_follow_from_a_few() -> None:
    """To whole chunks, if samples are padded to them, and with no step from one length to the next otherwise."""
    for model_type, lengths in (("mamba2", (1, 4, 5, 8, 50)), ("mamba", (1, 9, 100)), ("minimax", (10, 100, 300))):
        config = small(model_type)
        one = [_cost(config, Stage(), lengths=(length,))["layers"].inner for length in lengths]
        both = _cost(config, Stage(), lengths=lengths)["layers"].inner
        assert both == pytest.approx(sum(one))
        assert one == sorted(one)
        assert one[0] > 0
        if model_type == "mamba2":
            assert one[0] == one[1] < one[2] == one[3]
        if model_type == "mamba":
            assert one[1:] == pytest.approx([9 * one[0], 100 * one[0]])


def test_attention_whose_projections_are_experts_is_counted_by_hand() -> None:
    """Of JetMoe, whose routers say how many rows each expert takes: of its weights each row meets the chosen ones."""
    config: Any = small("jetmoe")
    library = config.library()
    layers = _cost(config, Stage())["layers"]
    keys = 2 * library.num_key_value_heads * library.kv_channels
    heads = library.num_key_value_heads * library.num_experts_per_tok
    pairs = sum(length**2 for length in LENGTHS) / 2
    assert layers.inner == config.layers * 4 * pairs * heads * library.kv_channels
    chosen = library.num_experts_per_tok * (keys + 3 * library.intermediate_size)  # query and output, feed-forward
    outputs = keys + chosen + 2 * library.num_local_experts
    assert layers.weighted == 2 * sum(LENGTHS) * config.layers * library.hidden_size * outputs


def test_what_cannot_run_without_storage_is_counted_by_its_weights_alone() -> None:
    """As what reads back a number that depends on weights."""
    config = small("llama", num_hidden_layers=3)
    _cost(config, Stage(), "full")  # whether it may be trained is tried before
    _counted.cache_clear()
    with patch.object(HfStage, "forward", side_effect=RuntimeError("no storage")):
        layers = _cost(config, Stage())["layers"]
    _counted.cache_clear()
    assert layers.inner == 0
    parameters = HfStage(config, Stage()).layers.parameters()
    matrices = sum(one.numel() for one in parameters if one.dim() > 1)
    assert layers.weighted == 2 * sum(LENGTHS) * matrices


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
