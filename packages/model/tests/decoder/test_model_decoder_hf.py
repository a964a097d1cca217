"""The decoder's published families against `transformers`' own models, from small random configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from mimo.hooks import ConfigError
from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.decoder.hf import DECODER_HF
from mimo.model.runtime import LanguageBatch, read_hf, write_hf
from mimo.model.spec.hf import HfFamily
from mimo.testing.comparison import check_gradients, draw, put_gradients, saved

LENGTHS = (9, 1, 17, 4)
SMALL: Mapping[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: Mapping[str, Any] = {
    **SMALL,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
}


def family_of(model_type: str) -> HfFamily:
    """Return the family of a ``model_type``."""
    return next(family for family in DECODER_HF if family.model_type == model_type)


MODELS: Mapping[str, tuple[type[Any], Any]] = {
    "Llama 2": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": None})),
    "Llama 3": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3, rms_norm_eps=1e-2)),
    "Llama with biases": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=10)),
    "Llama, linear": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}),
    ),
    "Mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=5, head_dim=8)),
    "Mistral, no window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
    "Qwen 2.5": (Qwen2ForCausalLM, Qwen2Config(**SMALL, rope_parameters={"rope_theta": 1e6})),
    "Qwen 2.5 tied": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "Qwen 2.5, window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    ),
    "Qwen 3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
    "Qwen 3 with biases": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=14, attention_bias=True)),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True)),
    "Qwen3-MoE, first layer dense": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[0])),
}


def files_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return what a model's published folder holds, but for its vision, as if it were of text alone."""
    found = {name.replace(".language_model.", "."): tensor for name, tensor in saved(model, folder).items()}
    return {name: tensor for name, tensor in found.items() if not name.startswith(("visual.", "model.visual."))}


def ours_of(model: Any, family: HfFamily, folder: Path) -> tuple[Any, DecoderConfig]:
    """Return a decoder with a model's weights and settings."""
    config = DecoderConfig(**family.settings(model.config.get_text_config().to_dict()))
    module = DECODER.build(config, Stage())
    assert read_hf(module, family, config, files_of(model, folder)) == ()
    return module, config


def packed(tokens: Tensor, lengths: Sequence[int], **more: Any) -> LanguageBatch:
    """Return samples without labels."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return LanguageBatch.of(tokens, torch.full_like(tokens, -100), positions, lengths=lengths, **more)


@pytest.mark.parametrize("dense", [[], [0]])
def test_a_folder_that_trains_its_routers_has_the_loss_of_transformers(dense: list[int], tmp_path: Path) -> None:
    """Of a sample, the mean over the layers with experts, with every gradient; without that key there is none."""
    keys = {**EXPERTS, "mlp_only_layers": dense, "router_aux_loss_coef": 0.3}
    assert DecoderConfig(**family_of("qwen3_moe").settings(keys)).balance_loss == 0
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys, output_router_logits=True)).eval()
    draw(theirs.parameters())
    ours, config = ours_of(theirs, family_of("qwen3_moe"), tmp_path)
    tokens = torch.randint(31, (17,), generator=torch.Generator().manual_seed(4))
    logits = theirs(tokens[None]).router_logits
    each = [torch.as_tensor(load_balancing_loss_func((one,), 5, 2)) for one in logits]
    expected = 0.3 * torch.stack(each).mean()
    expected.backward()
    batch = LanguageBatch.of(tokens, tokens, torch.arange(17), lengths=(17,))
    ours(batch, {}, None)
    found = batch.aux_losses.losses["balance"] / batch.label_tokens[0]
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        put_gradients(model.parameters())
    check_gradients(write_hf(ours, family_of("qwen3_moe"), config), files_of(theirs, tmp_path / "gradients"))


@pytest.mark.parametrize("name", MODELS)
def test_packed_samples_are_what_transformers_computes_one_by_one(name: str, tmp_path: Path) -> None:
    """Logits and every gradient, with the weights of the folder that it writes."""
    build, given = MODELS[name]
    theirs = build(given).eval()
    draw(theirs.parameters())
    family = family_of(given.model_type)
    ours, config = ours_of(theirs, family, tmp_path)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(31, (sum(LENGTHS),), generator=generator)
    weights = torch.randn(sum(LENGTHS), 31, generator=generator)
    found = ours.logits(ours(packed(tokens, LENGTHS), {}, None))
    expected = torch.cat([theirs(sample[None]).logits[0] for sample in tokens.split(LENGTHS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for model in (ours, theirs):
        put_gradients(model.parameters())
    check_gradients(write_hf(ours, family, config), files_of(theirs, tmp_path / "gradients"))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """A model of the configuration that we describe is the same model, and a description of it is the same again."""
    build, given = MODELS[name]
    theirs = build(given).eval()
    draw(theirs.parameters())
    family = family_of(given.model_type)
    _, config = ours_of(theirs, family, tmp_path)
    described = family.describe(config)
    again = build(type(given)(**described, attn_implementation="eager")).eval()
    again.load_state_dict(theirs.state_dict())
    tokens = torch.arange(19)[None] * 7 % 31
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=0)
    assert DecoderConfig(**family.settings(described)) == DecoderConfig(**family.settings(again.config.to_dict()))


TOWER: Mapping[str, Any] = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 24}
VLS: Mapping[str, tuple[Any, Any, Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_5_vl_text": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, {"mrope_section": [1, 2, 3]}, {}),
    "qwen3_vl_text": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        {"mrope_section": [4, 1, 1], "mrope_interleaved": True},
        {"head_dim": 12},
    ),
}
"""Of each family the composed model and its config, how the text turns, and more of its keys."""


@pytest.mark.parametrize("model_type", VLS)
def test_grids_turn_as_in_qwens_vls(model_type: str, tmp_path: Path) -> None:
    """Two images among text, of unequal grids, and a sample of text: hidden rows, and gradients of all that is read."""
    model, whole, turned, more = VLS[model_type]
    text = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, **more}
    rope = {"rope_type": "default", "rope_theta": 100.0, **turned}
    text = {**text, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    theirs = model(whole(text_config=text, vision_config=TOWER, attn_implementation="eager")).eval()
    draw(theirs.parameters())
    theirs.model.visual.requires_grad_(False)
    family = family_of(model_type)
    ours, config = ours_of(theirs, family, tmp_path)
    assert config.mrope_section == tuple(turned["mrope_section"])

    tokens = torch.arange(30) * 7 % 29
    grids = [(1, 2, 3), (1, 4, 1)]
    places = torch.tensor([*range(3, 9), *range(14, 18)])
    tokens[places] = 30
    positions, _ = theirs.model.get_rope_index(
        tokens[None],
        mm_token_type_ids=(tokens == 30).int()[None],
        image_grid_thw=torch.tensor([(frames, 2 * down, 2 * across) for frames, down, across in grids]),
    )  # [3, 1, T]; their encoder merges patches two by two
    rows = torch.randn(len(places), 24, generator=torch.Generator().manual_seed(3))
    given_ours, given_theirs = (rows.clone().requires_grad_() for _ in range(2))
    plain = torch.arange(5)
    batch = packed(
        torch.cat((plain, tokens)),
        (len(plain), len(tokens)),
        placeholders={"vision": places + len(plain)},
        grid_positions=torch.cat((plain[:, None].expand(-1, 3), positions[:, 0].T)),
    )
    found = ours.logits(ours(batch, {"vision": given_ours}, None))
    embedded = theirs.model.language_model.embed_tokens(tokens).index_copy(0, places, given_theirs)
    expected = theirs(inputs_embeds=embedded[None], position_ids=positions).logits[0]
    expected = torch.cat((theirs(input_ids=plain[None]).logits[0], expected))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(given_ours.grad, given_theirs.grad, rtol=1e-3, atol=1e-5)
    for one in (ours, theirs):
        put_gradients(one.parameters())
    check_gradients(write_hf(ours, family, config), files_of(theirs, tmp_path / "gradients"))
    flat = ours(attrs.evolve(batch, grid_positions=None), {"vision": given_ours}, None)
    assert not torch.allclose(ours.logits(flat), found, atol=1e-3)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_add_rows_of_images_as_in_qwen3_vl(stages: int, tmp_path: Path) -> None:
    """Both layers do, in stages of one too: losses, and gradients of weights and of all that the tower delivers."""
    text = {**SMALL, "head_dim": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 1, 1], "mrope_interleaved": True}
    said: Mapping[str, Any] = {"text_config": {**text, "rope_parameters": rope}, "vision_config": TOWER}
    theirs: Any = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**{**said, "attn_implementation": "eager"})).eval()
    draw(theirs.parameters())
    family = family_of("qwen3_vl_text")
    config = attrs.evolve(DecoderConfig(**family.settings(theirs.config.text_config.to_dict())), deepstack=2)
    assert family.settings(family.describe(config)) == family.settings(theirs.config.text_config.to_dict())
    whole: Any = DECODER.build(config, Stage())
    read_hf(whole, family, config, files_of(theirs, tmp_path))
    held = whole.state_dict()
    ours: list[Any] = [DECODER.build(config, Stage(index, stages)) for index in range(stages)]
    for stage in ours:
        stage.load_state_dict({name: held[name] for name in stage.state_dict()})

    tokens, places = torch.arange(20) * 7 % 29, torch.tensor([2, 3, 4, 12, 13])
    places_in_grids = torch.stack((torch.arange(20), torch.arange(20) // 2, torch.arange(20) % 3))  # [3, T]
    given = [torch.randn(5, 72, generator=torch.Generator().manual_seed(3)).requires_grad_()]
    given.append(given[0].detach().clone().requires_grad_())
    batch = packed(tokens, (20,), placeholders={"vision": places}, grid_positions=places_in_grids.T)
    hidden: Any = None
    for stage in ours:
        hidden = stage(batch, {} if hidden is not None else {"vision": given[0]}, hidden)
        assert hidden.shape == (20, DECODER.message_width(config, stage.stage))
    found = ours[-1].logits(hidden)

    own, *deep = given[1].split(24, 1)
    embedded = theirs.model.language_model.embed_tokens(tokens).index_copy(0, places, own)
    last = theirs.model.language_model(
        inputs_embeds=embedded[None],
        position_ids=places_in_grids[:, None],
        visual_pos_masks=torch.zeros(1, 20, dtype=torch.bool).index_fill(1, places, value=True),
        deepstack_visual_embeds=deep,
    ).last_hidden_state
    expected = theirs.lm_head(last)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-3, atol=1e-5)
    for name, parameter in whole.named_parameters():
        parameter.grad = next(each for stage in ours for path, each in stage.named_parameters() if path == name).grad
    for one in (whole, theirs):
        put_gradients(one.parameters())
    check_gradients(write_hf(whole, family, config), files_of(theirs, tmp_path / "gradients"))


def test_where_all_is_text_three_positions_are_one() -> None:
    """A model with sections computes bitwise what it does without, whether it is given equal positions or none."""
    config = DecoderConfig(vocabulary=31, hidden=24, layers=2, heads=2, intermediate=20)
    plain = DECODER.build(config, Stage())
    turned: Any = DECODER.build(attrs.evolve(config, mrope_section=(3, 1, 2)), Stage())
    turned.load_state_dict(plain.state_dict())
    batch = packed(torch.arange(30), (20, 10))
    expected = plain(batch, {}, None)
    assert torch.equal(turned(batch, {}, None), expected)
    places = batch.positions[:, None].expand(-1, 3)
    assert torch.equal(turned(attrs.evolve(batch, grid_positions=places), {}, None), expected)


OLD: Mapping[str, Any] = {**SMALL, "rope_theta": 500.0, "rms_norm_eps": 1e-5}


def test_both_spellings_of_positions_are_read() -> None:
    """``rope_theta`` and ``rope_scaling`` say what ``rope_parameters`` says since transformers 5."""
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    settings = family_of("llama").settings
    old = settings({**OLD, "rope_scaling": scaling})
    assert old == settings({**OLD, "rope_theta": None, "rope_parameters": LLAMA3})
    assert (old["rope_theta"], old["rope_scaling"], old["rope_factor"]) == (500.0, "llama3", 8.0)
    assert settings({**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}})["rope_scaling"] == "linear"
    assert settings({**OLD, "rope_scaling": None}) == settings({**OLD, "rope_parameters": {"rope_theta": 500.0}})
    section = {"type": "mrope", "mrope_section": [1, 1, 1]}
    assert family_of("qwen2_vl_text").settings({**OLD, "rope_scaling": section})["mrope_section"] == (1, 1, 1)


def test_what_goes_before_is_read() -> None:
    """A length beside the scaling goes before the one in it; grids without sections have those of Qwen2-VL."""
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    found = family_of("llama").settings({**OLD, "rope_scaling": scaling, "original_max_position_embeddings": 9})
    assert found["rope_original_tokens"] == 9
    assert family_of("qwen2_vl_text").settings({**OLD, "rope_scaling": None})["mrope_section"] == (16, 24, 24)


LEFT_OUT: Mapping[str, type[Any]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen2_vl_text": Qwen2VLTextConfig,
    "qwen2_5_vl_text": Qwen2_5_VLTextConfig,
    "qwen3_vl_text": Qwen3VLTextConfig,
}


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_keys_that_are_left_out_mean_what_transformers_takes_them_for(model_type: str) -> None:
    """Sections of composed models name only what differs, such as LLaVA 1.5's of its language model."""
    for some in ({}, {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 20}):
        there = LEFT_OUT[model_type](**some).to_dict()
        ours, theirs = (DecoderConfig(**family_of(model_type).settings(keys)) for keys in (some, there))
        assert attrs.evolve(ours, head_dim=ours.head_width, kv_heads=ours.key_value_heads) == attrs.evolve(
            theirs, head_dim=theirs.head_width
        )


REFUSED: Sequence[tuple[str, Mapping[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act: expected 'silu', as ours knows no other, got 'gelu'"),
    (
        "qwen2",
        {"attention_dropout": 0.1},
        "attention_dropout: expected 0.0, as ours drops nothing of that kind at random, got 0.1",
    ),
    ("llama", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type: expected one of default, linear, llama3"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type: expected one of"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a number, as rope_type 'linear' n"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
    ("llama", {"hidden_size": None}, "hidden_size: expected a whole number, got None"),
    ("llama", {"hidden_size": 1 << 40}, "hidden_size: expected at most 2147483647, got 1099511627776"),
    ("llama", {"attention_bias": "false"}, "attention_bias: expected true or false, got 'false'"),
    ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config: expected None"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "max_window_layers: expected a window on all layers or on none, got 1",
    ),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types: expected a window on all layers or on none",
    ),
    ("llama", {"is_causal": False}, "is_causal: expected True, as ours knows no other, got False"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types: expected full_attention alone, got ['sliding_"),
    (
        "mistral",
        {"sliding_window": 4, "layer_types": ["full_attention"] * 2},
        "layer_types: expected sliding_attention alone, got ['full_attention', 'full_attention']",
    ),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types: expected a window on all layers or on none"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: expected full_attention alone"),
    (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters.full_attention: expected the same positions in all layers, got {'rope_theta': 5.0}",
    ),
    ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]}}, "mrope_section: expected [], as ours"),
    (
        "qwen3_vl_text",
        {"rope_parameters": {"mrope_interleaved": False}},
        "mrope_interleaved: expected True, as ours knows no other, got False",
    ),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers: expected the first layers"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: expected 1"),
]


@pytest.mark.parametrize(("model_type", "keys", "expected"), REFUSED)
def test_what_the_decoder_has_not_is_refused_by_its_key(
    model_type: str, keys: Mapping[str, Any], expected: str
) -> None:
    """Another activation, dropout, other positions: the key of ``config.json`` is named."""
    with pytest.raises(ConfigError, match=re.escape(f"config.json: {expected}")):
        family_of(model_type).settings({**EXPERTS, **keys})


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"query_key_norm": True}, "query_key_norm: expected False, as models of the family 'llama' have no"),
        ("llama", {"sliding_window": 8}, "sliding_window: expected 0"),
        ("llama", {"mrope_section": (1, 1, 1)}, "mrope_section"),
        ("llama", {"deepstack": 1}, "deepstack: expected 0, as models of the family 'llama' have no other, got 1"),
        ("llama", {"hidden": 26, "head_dim": 6}, "hidden: expected a multiple of heads = 4, as LlamaConfig demands"),
        ("mistral", {"attention_bias": True}, "attention_bias: expected False"),
        ("qwen2", {}, "qkv_bias: expected True"),
        ("qwen2_5_vl_text", {"qkv_bias": True}, "mrope_section: expected numbers of turned pairs"),
        (
            "qwen2_vl_text",
            {"qkv_bias": True, "head_dim": 8, "mrope_section": (1, 1, 2)},
            "head_dim: expected hidden / heads = 6, as these models have no other, got 8",
        ),
        (
            "qwen3_vl_text",
            {"query_key_norm": True, "mrope_section": (1, 1, 1)},
            "mrope_interleaved: expected True, as models of the family 'qwen3_vl_text' have no other, got False",
        ),
        ("qwen2_vl", {"qkv_bias": True}, "expected a language model with its vision tower, got a language model alone"),
        ("qwen3", {"experts": 4, "query_key_norm": True}, "experts: expected 0"),
        ("qwen3_moe", {"experts": 4, "query_key_norm": True, "shared_intermediate": 3}, "shared_intermediate: expect"),
        ("qwen3_moe", {"experts": 4, "query_key_norm": True, "expert_bias_rate": 0.1}, "expert_bias_rate: expected 0"),
    ],
)
def test_what_a_family_has_no_place_for_is_refused(model_type: str, settings: Mapping[str, Any], expected: str) -> None:
    """A setting that a folder of the family can't say is named, rather than lost."""
    config = DecoderConfig(**{"vocabulary": 31, "hidden": 24, "heads": 4, **settings})
    with pytest.raises(ConfigError, match=rf"modules\.language\.config[.:] ?{re.escape(expected)}"):
        family_of(model_type).describe(config)
