"""Published weights of `hf-decoder`, in and out, against what the library itself writes and computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import as_published, known, small

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HfFamily, Stage, file_shapes
from mimo.model.runtime import LanguageBatch, read_hf, write_hf
from mimo_transformers import HF_ENCODER, HfDecoderConfig, HfEncoderConfig
from mimo_transformers.family import config_of, new_network, new_tower, quiet
from mimo_transformers.model.small import thin_values
from mimo_transformers.model.stage import HfStage
from mimo_transformers.weights import CAUSAL, TOWERS
from mimo_transformers.weights.table import decoder_table


def family_of(model_type: str) -> HfFamily:
    """Return a family that is there."""
    found = CAUSAL.of(model_type)
    assert found is not None
    return found


def published(model_type: str, folder: Path) -> Any:
    """Return a small model of the library, with random weights, and have it written."""
    torch.manual_seed(5)
    with quiet(), torch.no_grad():
        network = new_network(small(model_type).library(), attention="eager").float().eval()
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        network.save_pretrained(folder)
    return network


@pytest.mark.parametrize(
    "model_type",
    [
        *("gemma3_text", "phi3", "deepseek_v3", "mixtral", "gpt_oss", "granitemoe"),
        *("beam", "jamba", "nemotron_h", "mamba2", "kimi_linear"),
    ],
)
def test_weights_go_in_and_out_to_the_bit(model_type: str, tmp_path: Path) -> None:
    """Tied, fused, cut, renamed; of experts one by one, stacked, turned or in halves; with null or infinity in keys."""
    network = published(model_type, tmp_path)
    family, theirs = family_of(model_type), load_file(tmp_path / "model.safetensors")
    settings = family.settings(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    config = HfDecoderConfig(**settings)
    assert family.settings(family.describe(config)) == settings
    stage = HfStage(config, Stage())
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.fill_(torch.nan)
    assert read_hf(stage, family, config, theirs) == ()
    ids = torch.randint(1, config.vocabulary, (9,))
    with torch.no_grad():
        wanted = network(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        found = stage.logits(stage(LanguageBatch.of(ids, ids, torch.arange(9), lengths=(9,)), {}, None))
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    back = write_hf(stage, family, config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


def test_keys_that_are_null_are_so_in_what_is_tried() -> None:
    """DeepSeek-V3's queries aren't always made through a narrow middle."""
    config = small("deepseek_v3", q_lora_rank=None)
    names = {entry.ours for entry in decoder_table(config)}
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any("q_a_proj" in name for name in names)


def test_the_table_of_a_large_model_has_its_layers_experts_and_widths() -> None:
    """Found on a thin one: each of 8 experts in 32 layers has three tensors, of Mixtral's own widths."""
    config = HfDecoderConfig(**family_of("mixtral").settings({"num_local_experts": 8, "intermediate_size": 11}))
    table = decoder_table(config)
    (down,) = (entry for entry in table if entry.ours == "layers.31.mlp.experts.down.weight")
    assert down.names[7] == "model.layers.31.block_sparse_moe.experts.7.w2.weight"
    assert len(down.names) == 8
    ours = {entry.ours: (8, 11, 4096) for entry in table if entry.ours.endswith((".gate.weight", ".up.weight"))}
    shapes = file_shapes([entry for entry in table if entry.ours in ours and entry.stacked], ours)
    assert shapes["model.layers.0.block_sparse_moe.experts.3.w1.weight"] == (11, 4096)


def test_halves_of_a_tensor_are_cut_at_the_widths_of_the_model() -> None:
    """Granite's gates lie before what they are the gates of, in one tensor of all experts."""
    keys = {"num_hidden_layers": 1, "num_local_experts": 2, "hidden_size": 64, "intermediate_size": 10}
    table = decoder_table(HfDecoderConfig(**family_of("granitemoe").settings({**keys, "vocab_size": 9})))
    found = {entry.ours: (entry.theirs, entry.along, entry.rows) for entry in table if entry.along}
    theirs = "model.layers.0.block_sparse_moe.input_linear.weight"
    layer = "layers.0.block_sparse_moe.experts"
    assert found == {f"{layer}.gate.weight": (theirs, 1, (0, 10)), f"{layer}.up.weight": (theirs, 1, (10, 20))}


def test_a_parameter_is_cut_at_the_widths_of_the_model() -> None:
    """Kimi Linear's convolution over queries, keys and values, which are published one by one."""
    sizes = {"hidden_size": 64, "linear_num_heads": 6, "linear_head_dim": 10, "num_experts": 2}
    keys = {**sizes, "num_hidden_layers": 1, "num_experts_per_token": 1, "layer_types": ["linear_attention"]}
    known("kimi_linear")
    table = decoder_table(HfDecoderConfig(**family_of("kimi_linear").settings(keys)))
    (found,) = (entry for entry in table if entry.lengths)
    names = tuple(f"model.layers.0.self_attn.{one}_conv1d.weight" for one in "qkv")
    assert (found.ours, found.names, found.lengths) == ("layers.0.self_attn.conv1d.weight", names, (60, 60, 60))


@pytest.mark.parametrize(
    ("model_type", "part", "lengths"), [("olmo_hybrid", ".q_conv1d.", (16, 16, 32)), ("molmo2_text", "wte.", (97, 128))]
)
def test_what_the_library_cuts_elsewhere_than_it_was_published_is_cut_as_published(
    model_type: str, part: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """OLMo Hybrid's values are wider than its keys, Molmo2 has few added ids; the library loads what is written."""
    network = published(model_type, tmp_path)
    theirs = as_published(load_file(tmp_path / "model.safetensors"))
    family, config = family_of(model_type), small(model_type)
    assert {entry.lengths for entry in decoder_table(config) if part in entry.names[0]} == {lengths}
    stage = HfStage(config, Stage())
    assert read_hf(stage, family, config, theirs) == ()
    back = write_hf(stage, family, config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())
    save_file(back, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with quiet():
        again = type(network).from_pretrained(tmp_path, attn_implementation="eager")
    assert all(torch.equal(one, network.state_dict()[name]) for name, one in again.state_dict().items())


def test_what_is_joined_of_unknown_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would write OLMo Hybrid's values as wide as its keys; and lengths are those of the whole."""
    keys = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    known("olmo_hybrid")
    refused = r"joins are of one length, .* got another one: .*q_conv1d\.weight"
    for lengths in ({}, {"olmo_hybrid": lambda _config: (8, 8, 8)}):
        monkeypatch.setattr("mimo_transformers.weights.table._JOINED", lengths)
        with pytest.raises(ConfigError, match=refused):
            decoder_table(HfDecoderConfig(**family_of("olmo_hybrid").settings(keys)))


def test_what_the_library_passes_over_is_passed_over() -> None:
    """DeepSeek-V3 is published with a layer that predicts further, which the library's class hasn't."""
    assert family_of("deepseek_v3").needless("model.layers.61.self_attn.o_proj.weight")
    assert not family_of("deepseek_v3").needless("model.layers.60.self_attn.o_proj.weight")


def test_nothing_of_a_folder_but_its_numbers_is_taken_over() -> None:
    """Code that it names isn't looked for, and is not named again."""
    family = family_of("llama")
    settings = family.settings(
        {"auto_map": {"AutoModel": "evil.Model"}, "architectures": ["Evil"], "rms_norm_eps": 1e-3}
    )
    assert settings["values"]["rms_norm_eps"] == 1e-3
    assert "evil" not in str([settings, family.describe(HfDecoderConfig(**settings))]).lower()


def test_dropout_of_a_folder_is_refused_by_its_key() -> None:
    """That of attention; what hidden rows lose is a setting, and what a head loses that isn't here doesn't count."""
    with pytest.raises(ConfigError, match=r"config.json: attention_dropout: expected 0.0, .* got 0.1"):
        family_of("phi").settings({"resid_pdrop": 0.1, "attention_dropout": 0.1})
    settings = family_of("phi").settings({"resid_pdrop": 0.1, "attention_dropout": 0.0})
    assert settings["values"]["resid_pdrop"] == 0.1
    described = family_of("phi").describe(HfDecoderConfig(**settings))
    assert described["resid_pdrop"] == 0.1
    assert family_of("gpt_neox").dropout == ["attention_dropout", "hidden_dropout"]


def test_what_cannot_be_a_language_model_has_no_family() -> None:
    """Nor have more experts than any model has a table."""
    assert CAUSAL.of("siglip_vision_model") is None
    assert CAUSAL.of("gemma3") is None  # with a tower; the class of its text is another
    assert CAUSAL.of("no-such-model") is None
    values = {"num_hidden_layers": 1000, "num_local_experts": 100}
    with pytest.raises(ConfigError, match=r"values: expected at most 65,536 experts .* got 100,000"):
        decoder_table(HfDecoderConfig(model_type="mixtral", vocabulary=9, values=values))
    with pytest.raises(ConfigError, match=r"values\.num_local_experts: expected at most 16384"):
        _ = HfDecoderConfig(model_type="mixtral", values={"num_local_experts": 2**40}).experts


@pytest.mark.parametrize(
    "model_type",
    [
        "dinov2",
        "radio",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("vit", "siglip_vision_model", "convnext")),
    ],
)
def test_towers_go_in_and_out_to_the_bit(model_type: str, tmp_path: Path) -> None:
    """What isn't trained and whole numbers too; the projector has no place there."""
    library = config_of(known(model_type), {})
    torch.manual_seed(5)
    with quiet(), torch.no_grad():
        network = new_tower(config_of(model_type, thin_values(library)))
        network.save_pretrained(tmp_path)
    family = TOWERS.of(model_type)
    assert family is not None
    theirs = load_file(tmp_path / "model.safetensors")
    settings = family.settings(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    config = HfEncoderConfig(**settings)
    assert family.settings(family.describe(config)) == settings
    encoder = HF_ENCODER.build(config, 8)
    left = read_hf(encoder, family, config, theirs)
    assert all(path.startswith("projector.") for path in left)
    back = write_hf(encoder, family, config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


def test_whole_numbers_of_a_tower_are_those_of_its_config() -> None:
    """RADIO's choice of class tokens is a tensor there; here it follows from the settings, and isn't saved."""
    config = HfEncoderConfig(model_type=known("radio"), values={"num_hidden_layers": 1, "summary_idxs": [2, 0, 1]})
    family = TOWERS.of("radio")
    assert family is not None
    (found,) = family.constants(config).items()
    assert (found[0], found[1].tolist()) == ("radio_model.summary_idxs", [2, 0, 1])
    small = HfEncoderConfig(model_type="radio", values=thin_values(config.library()))
    encoder = HF_ENCODER.build(small, 8)
    assert "encoder.summary_idxs" not in encoder.state_dict()
    written = write_hf(encoder, family, small)
    read_hf(encoder, family, small, written)
    with pytest.raises(CheckpointError, match=r"radio_model\.summary_idxs is not of the numbers that follow from the"):
        read_hf(encoder, family, small, {**written, found[0]: found[1].flip(0)})
