"""Published folders as `transformers` writes them, of small random models in which every weight matters."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mimo.testing.comparison import tensors_of

VOCABULARY = 40
TOKENS = torch.arange(11) * 7 % VOCABULARY


def llama_config(**keys: Any) -> LlamaConfig:
    """Return the configuration of a small language model."""
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
    return LlamaConfig(**{"vocab_size": VOCABULARY, "num_key_value_heads": 2, "rope_theta": 500.0, **sizes, **keys})


def siglip_config() -> SiglipVisionConfig:
    """Return the configuration of a small vision tower for grey pictures of four by four pixels."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    return SiglipVisionConfig(num_attention_heads=2, num_channels=1, image_size=4, patch_size=2, **sizes)


def llama(folder: Path, *, dtype: torch.dtype = torch.float32, shards: str = "1GB", **keys: Any) -> Path:
    """Write a language model."""
    return publish(LlamaForCausalLM(llama_config(**keys)), folder, dtype=dtype, shards=shards)


def siglip(folder: Path) -> Path:
    """Write a vision tower."""
    return publish(SiglipVisionModel(siglip_config()), folder)


def llava(folder: Path) -> Path:
    """Write both and a projector, as one model."""
    config = LlavaConfig(vision_config=siglip_config(), text_config=llama_config())
    return publish(LlavaForConditionalGeneration(config), folder)


def publish(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, shards: str = "1GB") -> Path:
    """Write a model after drawing all its weights anew, norms and biases too, but for scales that are always one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" not in name:
                parameter.normal_(mean=0.1, std=0.2)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of its progress
        model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def same_tensors(one: Path, other: Path) -> bool:
    """Return whether two published folders hold the same names, types and bits."""
    first, second = tensors_of(one), tensors_of(other)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits [S, V] of a sample [S] by the language model that `transformers` loads from a folder.

    All its weights must be in the folder, and nothing else.
    """
    return _logits(_load(folder), tokens)


def adapted_logits_of(folder: Path, adapter: Path, tokens: Tensor) -> Tensor:
    """Return the same after adding to linears what a folder of an adapter says, as the library PEFT does."""
    model = _load(folder)
    about, learned = json.loads((adapter / "adapter_config.json").read_text()), tensors_of(adapter)
    for target in about["target_modules"]:
        down, up = (learned.pop(f"base_model.model.{target}.lora_{letter}.weight") for letter in "AB")
        rank, alpha = (
            next(
                (one for pattern, one in about[f"{key}_pattern"].items() if re.fullmatch(pattern, target)),
                about[default],
            )
            for key, default in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert len(down) == rank
        linear = model.get_submodule(target)
        assert isinstance(linear, nn.Linear)
        with torch.no_grad():
            linear.weight += alpha / rank * up @ down
    assert not learned
    return _logits(model, tokens)


def _load(folder: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of its progress
        model, loading = load(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values()), loading
    return model.eval()


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens.unsqueeze(0)).logits
    return found[0]
