"""The hybrid's published families against `transformers`' own models, from small random configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba2 import Mamba2Config, Mamba2ForCausalLM
from transformers.models.nemotron_h import NemotronHConfig, NemotronHForCausalLM

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HYBRID, HfFamily, HybridConfig, Stage
from mimo.model.hybrid.hf import HYBRID_HF
from mimo.model.runtime import LanguageBatch, read_hf, write_hf
from mimo.testing import comparison
from mimo.testing.comparison import check_gradients, draw, put_gradients, saved

LENGTHS = (9, 1, 17, 4)
SHARED: Mapping[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "n_groups": 2,
    "chunk_size": 5,
    "conv_kernel": 3,
    "pad_token_id": 0,
}
NEMOTRON: Mapping[str, Any] = {
    **SHARED,
    **comparison.NEMOTRON,
    "layers_block_type": [*comparison.NEMOTRON["layers_block_type"], "linear_attention"],
    "time_step_min": 0.2,  # as short as several of the steps below, so that it matters
    "routed_scaling_factor": 2.5,
    "attn_implementation": "eager",
}
MAMBA: Mapping[str, Any] = {
    **SHARED, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 6, "expand": 2
}  # fmt: skip
MODELS: Mapping[str, tuple[type[Any], Any]] = {
    "Nemotron-H": (NemotronHForCausalLM, NemotronHConfig(**NEMOTRON)),
    "Nemotron-H with biases": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **{
                **NEMOTRON,
                "layers_block_type": ["linear_attention", "mlp", "full_attention"],
                "use_bias": True,
                "mlp_bias": True,
            }
        ),
    ),
    "Nemotron-H, scores as they are": (
        NemotronHForCausalLM,
        NemotronHConfig(**{**NEMOTRON, "layers_block_type": ["moe", "full_attention"], "norm_topk_prob": False}),
    ),
    "Mamba-2": (Mamba2ForCausalLM, Mamba2Config(**MAMBA)),
    "Mamba-2 tied": (Mamba2ForCausalLM, Mamba2Config(**{**MAMBA, "n_groups": 1}, tie_word_embeddings=True)),
    "Mamba-2, limited steps": (
        Mamba2ForCausalLM,
        Mamba2Config(**MAMBA, time_step_limit=[0.3, 0.8], use_bias=True, use_conv_bias=False),
    ),
}


def family_of(model_type: str) -> HfFamily:
    """Return the family of a ``model_type``."""
    return next(family for family in HYBRID_HF if family.model_type == model_type)


def tensors_in(model: nn.Module) -> list[Tensor]:
    """Return its parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def packed(tokens: Tensor) -> LanguageBatch:
    """Return samples without labels."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return LanguageBatch.of(tokens, torch.full_like(tokens, -100), positions, lengths=LENGTHS)


def ours_of(model: Any, family: HfFamily, folder: Path) -> tuple[Any, HybridConfig]:
    """Return a hybrid with a model's weights and settings."""
    config = HybridConfig(**family.settings(model.config.to_dict()))
    module = HYBRID.build(config, Stage())
    assert read_hf(module, family, config, saved(model, folder)) == ()
    return module, config


@pytest.mark.parametrize("name", MODELS)
def test_packed_samples_are_what_transformers_computes_one_by_one(name: str, tmp_path: Path) -> None:
    """Logits and every gradient, with the weights of the folder that it writes; states begin anew in each sample."""
    build, given = MODELS[name]
    theirs = build(given).eval()
    draw(tensors_in(theirs))
    family = family_of(given.model_type)
    ours, config = ours_of(theirs, family, tmp_path)
    back = write_hf(ours, family, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in saved(theirs, tmp_path).items())
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(31, (sum(LENGTHS),), generator=generator)
    weights = torch.randn(sum(LENGTHS), 31, generator=generator)
    found = ours.logits(ours(packed(tokens), {}, None))
    expected = torch.cat([theirs(sample[None]).logits[0] for sample in tokens.split(LENGTHS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for model in (ours, theirs):
        put_gradients(tensors_in(model))
    gradients = saved(theirs, tmp_path / "gradients")
    check_gradients(write_hf(ours, family, config), gradients, idle=["*.e_score_correction_bias"])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """A model of the configuration that we describe is the same model, and a description of it is the same again."""
    build, given = MODELS[name]
    theirs = build(given).eval()
    draw(tensors_in(theirs))
    family = family_of(given.model_type)
    _, config = ours_of(theirs, family, tmp_path)
    described = family.describe(config)
    again = build(type(given)(**described, attn_implementation="eager")).eval()
    again.load_state_dict(theirs.state_dict())
    tokens = torch.arange(19)[None] * 7 % 31
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=0)
    assert HybridConfig(**family.settings(again.config.to_dict())) == config


def _further() -> tuple[Any, HybridConfig, dict[str, Tensor]]:
    """Return a hybrid that predicts two further tokens, its config, and what a folder holds of it."""
    config = HybridConfig(
        **family_of("nemotron_h").settings({**NEMOTRON, "num_nextn_predict_layers": 1}), next_tokens=2
    )
    module = HYBRID.build(config, Stage())
    draw(tensors_in(module))
    return module, config, write_hf(module, family_of("nemotron_h"), config)


def test_further_tokens_have_the_names_of_published_folders() -> None:
    """Layers of all of them are counted through; the first of each joins, the token's half first, the last norms."""
    module, config, written = _further()
    assert config.next_pattern == "*E"
    held = dict(module.named_parameters())
    for number, first in ((0, 0), (1, 2)):
        ours = f"next_tokens.{number}"
        for theirs, path in {
            f"{first}.enorm": "token_norm",
            f"{first}.hnorm": "hidden_norm",
            f"{first}.eh_proj": "project",
            f"{first}.norm": "layers.0.norm",
            f"{first}.mixer.q_proj": "layers.0.mixer.query",
            f"{first + 1}.norm": "layers.1.norm",
            f"{first + 1}.mixer.shared_experts.up_proj": "layers.1.mixer.shared.up",
            f"{first + 1}.final_layernorm": "norm",
        }.items():
            assert torch.equal(written[f"mtp.layers.{theirs}.weight"], held[f"{ours}.{path}.weight"]), theirs
        expert = written[f"mtp.layers.{first + 1}.mixer.experts.3.down_proj.weight"]
        assert torch.equal(expert, held[f"{ours}.layers.1.mixer.experts.down.weight"][3])
    assert family_of("nemotron_h").beside(config) == {
        "num_nextn_predict_layers": 2,
        "mtp_layers_block_type": ["full_attention", "moe"],
        "mtp_hybrid_override_pattern": "*E",
    }


def test_folders_hold_all_of_further_tokens_or_none() -> None:
    """With none they are left as they are and reported; a part is refused; a model without them passes them over."""
    module, config, written = _further()
    family, other = family_of("nemotron_h"), HYBRID.build(config, Stage())
    assert read_hf(other, family, config, written) == ()
    assert all(torch.equal(value, other.state_dict()[path]) for path, value in module.state_dict().items())
    without = {name: tensor for name, tensor in written.items() if not name.startswith("mtp.")}
    left = read_hf(other, family, config, without)
    assert left == tuple(path for path, _ in module.named_parameters() if path.startswith("next_tokens."))
    torn = {name: tensor for name, tensor in written.items() if name != "mtp.layers.2.eh_proj.weight"}
    with pytest.raises(CheckpointError, match=r"got mtp\.layers\.2\.eh_proj\.weight is missing"):
        read_hf(other, family, config, torn)
    bare = attrs.evolve(config, next_tokens=0)
    composed = {f"language_model.{name}": tensor for name, tensor in written.items()}
    for folder in (written, composed):
        assert read_hf(HYBRID.build(bare, Stage()), family, bare, folder) == ()
    assert read_hf(other, family, config, composed) == ()


def test_older_folders_spell_their_layers_otherwise() -> None:
    """A pattern of letters, or other names of the kinds."""
    settings = family_of("nemotron_h").settings
    plain = {key: value for key, value in NEMOTRON.items() if key != "layers_block_type"}
    expected = settings(NEMOTRON)
    assert expected["pattern"] == "ME*-M"
    assert settings({**plain, "hybrid_override_pattern": "ME*-M"}) == expected
    assert settings({**plain, "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]}) == expected
    limit = family_of("mamba2").settings({**MAMBA, "time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert limit["mamba_step_high"] == float("inf")


@pytest.mark.parametrize("model_type", ["nemotron_h", "mamba2"])
def test_keys_that_are_left_out_mean_what_transformers_takes_them_for(model_type: str) -> None:
    """Sections of composed models name only what differs."""
    some: dict[str, Any] = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    some = some if model_type == "nemotron_h" else {}
    there = type(next(given for _, given in MODELS.values() if given.model_type == model_type))(**some).to_dict()
    ours, theirs = (HybridConfig(**family_of(model_type).settings(keys)) for keys in (some, there))
    assert ours == theirs


def test_older_names_of_keys_are_read() -> None:
    """As by `transformers`, which takes them for the newer ones."""
    old = {"mamba_n_groups": 3, "mamba_d_conv": 2, "mamba_dt_min": 0.5, "mamba_conv_bias": False, "mamba_chunk_size": 7}
    found = family_of("nemotron_h").settings({**NEMOTRON, **old})
    names = ("mamba_groups", "mamba_taps", "mamba_step_low", "mamba_conv_bias", "mamba_chunk")
    assert [found[name] for name in names] == list(old.values())
    there = NemotronHConfig(**{**NEMOTRON, **old}).to_dict()
    assert HybridConfig(**family_of("nemotron_h").settings(there)) == HybridConfig(**found)


def test_what_is_written_is_json() -> None:
    """Which knows no infinity: steps without limits need no key, and an upper one has the form of `transformers` 5."""
    family = family_of("mamba2")
    config = HybridConfig(**family.settings(MAMBA))
    assert config.mamba_step_high == float("inf")
    plain, low = (
        json.loads(json.dumps(family.describe(each), allow_nan=False))
        for each in (config, attrs.evolve(config, mamba_step_low=0.5))
    )
    assert "time_step_limit" not in plain
    assert low["time_step_limit"] == [0.5, {"__float__": "Infinity"}]
    assert family.settings(plain)["mamba_step_high"] == family.settings(low)["mamba_step_high"] == float("inf")


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("nemotron_h", {"n_group": 2}, "n_group: expected 1"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size: expected None"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected 'relu2'"),
        ("nemotron_h", {"layers_block_type": ["moe", "conv"]}, "layers_block_type: expected layers of the kinds"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type: expected the kind of each layer, got None"),
        (
            "nemotron_h",
            {"moe_shared_expert_intermediate_size": 0},
            "moe_shared_expert_intermediate_size: expected a sh",
        ),
        ("nemotron_h", {"time_step_limit": [0.0, 0.5]}, "time_step_limit: expected no limit, as time_step_min is the "),
        ("nemotron_h", {"attention_dropout": 0.1}, "attention_dropout: expected 0.0"),
        ("nemotron_h", {"is_causal": False}, "is_causal: expected True"),
        ("nemotron_h", {"use_bias": "false"}, "use_bias: expected true or false, got 'false'"),
        ("nemotron_h", {"mamba_num_heads": None}, "mamba_num_heads: expected a whole number, got None"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ],
)
def test_what_the_hybrid_has_not_is_refused_by_its_key(model_type: str, keys: Mapping[str, Any], expected: str) -> None:
    """Groups of experts, another activation, other layers: the key of ``config.json`` is named."""
    given = NEMOTRON if model_type == "nemotron_h" else MAMBA
    with pytest.raises(ConfigError, match=re.escape(f"config.json: {expected}")):
        family_of(model_type).settings({**given, **keys})


def test_what_the_library_never_drops_is_passed_over() -> None:
    """``hidden_dropout`` of Nemotron-H, which its model never reads, though it can still be set aside."""
    family = family_of("nemotron_h")
    assert family.settings({**NEMOTRON, "hidden_dropout": 0.1}) == family.settings(NEMOTRON)
    assert "hidden_dropout" in family.dropout


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("nemotron_h", {"pattern": "M-", "activation": "swiglu"}, "activation: expected 'relu2'"),
        ("nemotron_h", {"pattern": "*", "attention_bias": True}, "attention_bias: expected False"),
        ("nemotron_h", {"pattern": "M", "mamba_step_high": 1.0}, "mamba_step_high: expected inf"),
        (
            "nemotron_h",
            {"pattern": "E", "experts": 4, "activation": "relu2", "router_score": "sigmoid", "router_bias": True},
            "shared_intermediate: expected 1024, as models of the family 'nemotron_h' have no other, got 0",
        ),
        ("mamba2", {"pattern": "M*"}, "pattern: expected 'MM'"),
        ("mamba2", {"pattern": "M", "mamba_head_dim": 5}, "mamba_heads: expected heads whose columns are a multiple"),
    ],
)
def test_what_a_family_has_no_place_for_is_refused(model_type: str, settings: Mapping[str, Any], expected: str) -> None:
    """A setting that a folder of the family can't say is named, rather than lost."""
    config = HybridConfig(**{"vocabulary": 31, "hidden": 32, **settings})
    with pytest.raises(ConfigError, match=re.escape(f"modules.language.config.{expected}")):
        family_of(model_type).describe(config)
