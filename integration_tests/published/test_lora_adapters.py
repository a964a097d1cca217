"""LoRA of a model several of whose linears are one in the published model, written as an adapter of that one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import here
from published import TOKENS, adapted_logits_of, logits_of, publish
from resuming import resume_and_save
from tables import table
from test_hf_families import CONFIGS, NEMOTRON, READERS
from test_hf_folders import checkpoint
from test_oracle import on
from torch import nn
from transformers import AutoConfig, NemotronHConfig, NemotronHForCausalLM

from mimo.model import DecoderConfig, LanguageModelSpec, Stage, match_names
from mimo.model.runtime import linears
from mimo.testing import Pool

LORA = {"rank": 3, "alpha": 12.0, "targets": ["layers.0.mixer.[gis]*", "layers.[23].*", "layers.1.mixer.shared.*"]}
"""Of what a Mamba layer reads its inputs by, three of five."""


def tuned(folder: Path, pool: Pool, **lora: Any) -> Path:
    """Publish a Nemotron-H, and adapt it for two steps; return the run."""
    keys: dict[str, Any] = {**NEMOTRON, "vocab_size": 300}
    there = publish(NemotronHForCausalLM(NemotronHConfig(**keys)), folder / "there")
    tables = tomllib.loads(checkpoint("import-hf", there, "--out", folder / "ours"))["modules"]
    settings = table({"language": on(0, 0)})
    settings["optimizer"]["lr"] = 0.02
    settings["modules"]["language"] |= {**tables["language"], "lora": {**LORA, **lora}}
    settings["run"]["directory"] = str(folder / "run")
    settings |= {"load": {"finetune": str(folder / "ours")}}
    pool.run(1, resume_and_save, settings, 1, 2)
    return folder / "run"


def test_rows_of_one_projection_are_adapted_as_one(tmp_path: Path, pool: Pool) -> None:
    """With a rank of its own and the same scale: the model is the one whose weights LoRA was added to."""
    run = tuned(tmp_path, pool)
    checkpoint("export-hf", run, tmp_path / "merged")
    checkpoint("export-hf", run, tmp_path / "adapter", "--adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (3, 12.0)
    name = r"model\.layers\.0\.mixer\.in_proj"
    assert (about["rank_pattern"], about["alpha_pattern"]) == ({name: 9}, {name: 36.0})
    merged, plain = logits_of(tmp_path / "merged", TOKENS), logits_of(tmp_path / "there", TOKENS)
    assert (plain - merged).norm() > 1e-3 * merged.norm()
    found = adapted_logits_of(tmp_path / "there", tmp_path / "adapter", TOKENS)
    assert (found - merged).norm() <= 1e-5 * merged.norm()


def test_what_peft_cannot_adapt_is_refused(tmp_path: Path, pool: Pool) -> None:
    """Experts, which are slices of one tensor there, and the linear whose weight a Mamba layer reads itself."""
    run = tuned(tmp_path, pool, targets=["*"])
    refused = here("checkpoint", "export-hf", run, tmp_path / "adapter", "--adapter")
    assert refused.code == 2
    linears = "layers.0.mixer.output, layers.1.mixer.experts.down, layers.1.mixer.experts.up"
    assert f", and that PEFT can adapt there, got {linears}, which are none. Export without --adapter" in refused.err
    assert not (tmp_path / "adapter").exists()


def test_what_is_called_as_parts_of_experts_is_none_of_an_adapter() -> None:
    """PEFT would take what dense layers of a Qwen3-MoE have for parts of experts."""
    family = READERS["qwen3_moe"].family
    assert family.adaptable is not None
    config = DecoderConfig(vocabulary=7, hidden=8, layers=2, heads=2, intermediate=6, experts=2, dense_layers=1)
    inside = {entry.ours.removeprefix("layers.0.").partition(".")[0] for entry in family.adaptable(config)}
    assert "attention" in inside
    assert "mlp" not in inside


@pytest.mark.parametrize("model_type", CONFIGS)
def test_adapters_name_what_transformers_makes_of_each_family(model_type: str) -> None:
    """Every linear or convolution beside which one may stand is a module there, with as many outputs."""
    reader, keys = READERS[model_type], CONFIGS[model_type]
    family, spec = reader.family, reader.spec
    with torch.device("meta"):
        theirs = getattr(transformers, family.architecture)(AutoConfig.for_model(model_type, **keys))
        config = spec.config(**family.settings(theirs.config.to_dict()))
        ours = spec.build(config, Stage()) if isinstance(spec, LanguageModelSpec) else spec.build(config, 8)
    _, table = match_names(family, family.tensors(config), ())
    weights = {f"{path}.weight" for path, _ in linears(ours)}
    adaptable = table if family.adaptable is None else family.adaptable(config)
    entries = [entry for entry in adaptable if entry.ours in weights and not entry.stacked]
    assert len(entries) > 2
    for entry in entries:
        module = theirs.get_submodule(entry.names[0].removesuffix(".weight"))
        assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
        start, stop = entry.rows or (0, len(module.weight))
        assert (stop - start) * module.weight[0].numel() == ours.get_parameter(entry.ours).numel()
