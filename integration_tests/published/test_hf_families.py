"""Every published family that an installed plugin knows goes in and out to the bit, as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import transformers
from commands import here
from published import publish

from mimo.testing import comparison
from mimo.testing.comparison import tensors_of
from mimo.trainer.runtime import Reader, installed_readers

SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "vocab_size": 40, "num_key_value_heads": 2, "head_dim": 8}
TOWER = {**SIZES, "image_size": 8, "patch_size": 2}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
WHISPER = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
STATES = {"hidden_size": 24, "vocab_size": 40, "n_groups": 2, "pad_token_id": 0}
MAMBA = {**STATES, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 4}
NEMOTRON = {**STATES, **comparison.NEMOTRON}
RADIO = {
    **SIZES,
    "mlp_ratio": 2.0,
    "patch_size": 4,
    "max_img_size": 40,
    "num_cls_tokens": 2,
    "num_registers": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "qwen3_moe": {**DECODER, **MIXTURE},
    "siglip_vision_model": TOWER,
    "siglip2_vision_model": {**SIZES, "num_patches": 16, "patch_size": 2},
    "clip_vision_model": TOWER,
    "whisper": WHISPER,
    "mamba2": MAMBA,
    "nemotron_h": NEMOTRON,
    "radio": RADIO,
}
READERS = {
    reader.family.model_type: reader for reader in [*installed_readers("language"), *installed_readers("vision")]
}


def left_out(reader: Reader, folder: Path) -> tuple[str, ...]:
    """Return patterns of what a folder has and ours needs not hold: another tower, a head, fixed numbers."""
    settings = reader.family.settings(json.loads((folder / "config.json").read_text()))
    return (*reader.family.ignored, *reader.family.fixed(reader.spec.config(**settings)))


def other_than(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Return the names that no pattern fits."""
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)}


def test_every_family_is_among_them() -> None:
    """Of installed plugins; but for language models that are published only beside a tower, in one folder."""
    assert CONFIGS.keys() == {model_type for model_type in READERS if "_vl" not in model_type}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_each_family_goes_in_and_out_to_the_bit(tmp_path: Path, model_type: str) -> None:
    """All that ours holds of it; `transformers` loads it again, and misses nothing but what ours leaves out."""
    reader = READERS[model_type]
    made: Any = getattr(transformers, reader.family.architecture)
    there = publish(made(transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])), tmp_path / "there")
    imported = here("checkpoint", "import-hf", f"{reader.module}={there}", "--out", tmp_path / "ours")
    assert f"{reader.module}: {model_type} from {there} for {reader.spec.name}, " in imported.printed
    words = (tmp_path / "ours", tmp_path / "back", "--module", reader.module, "--shard-bytes", "9000")
    assert f"as {reader.family.architecture}, " in here("checkpoint", "export-hf", *words).printed
    before, after = tensors_of(there), tensors_of(tmp_path / "back")
    less = left_out(reader, there)
    assert other_than(before.keys() - after.keys(), less) == after.keys() - before.keys() == set()
    assert all(before[name].equal(tensor) for name, tensor in after.items())
    again, loading = made.from_pretrained(tmp_path / "back", output_loading_info=True)
    weights = {name for name, _ in again.named_parameters()}  # buffers follow from its settings
    assert other_than(weights & loading.pop("missing_keys"), less) == set()
    assert not any(loading.values()), loading


def test_an_exported_whisper_encoder_loads_beside_a_new_decoder(tmp_path: Path) -> None:
    """As `AutoModel` makes it, also where the width has no divisor of six heads, the decoder's usual number."""
    made: Any = transformers.WhisperModel
    config = transformers.AutoConfig.for_model("whisper", **{**WHISPER, "d_model": 32})
    there = publish(made(config), tmp_path / "there")
    here("checkpoint", "import-hf", f"audio={there}", "--out", tmp_path / "ours")
    here("checkpoint", "export-hf", tmp_path / "ours", tmp_path / "back", "--module", "audio")
    _, loading = transformers.AutoModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert all(name.startswith("decoder.") for name in loading.pop("missing_keys"))
    assert not any(loading.values()), loading
