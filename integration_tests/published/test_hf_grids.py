"""Folders of Qwen2-VL's families: the language model goes in and out; of text alone they have no class with a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import here
from published import TOKENS, VOCABULARY, publish

from mimo.testing.comparison import tensors_of

TEXT = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 3]},
}
TOWER = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 24}


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_with_grids_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:
    """Compare its hidden rows and the head, or the whole model, whose tower is new, as the summary says."""
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=TOWER, tie_word_embeddings=tied)
    whole: Any = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    there, back = publish(whole, tmp_path / "there"), tmp_path / "back"
    with torch.no_grad():
        expected = whole(TOKENS[None]).logits
    here("checkpoint", "import-hf", f"language={there}", "--out", tmp_path / "ours")
    printed = here("checkpoint", "export-hf", tmp_path / "ours", back).printed
    assert f"{back}: language as Qwen2_5_VLTextModel, {26 if tied else 27} tensors of float32\nnote: " in printed
    assert "Qwen2_5_VLTextModel gives hidden rows" in printed
    held = tensors_of(back)
    assert all(torch.equal(tensors_of(there)[name], tensor) for name, tensor in held.items())
    text, loading = transformers.AutoModel.from_pretrained(back, output_loading_info=True)
    assert type(text).__name__ == "Qwen2_5_VLTextModel"
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert {key: set(names) for key, names in loading.items() if names} == ({} if tied else {"unexpected_keys": {head}})
    config = transformers.Qwen2_5_VLConfig.from_pretrained(back)
    config.vision_config = transformers.Qwen2_5_VLConfig(vision_config=TOWER).vision_config
    again: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(back, config=config)
    with torch.no_grad():
        assert torch.equal(text(TOKENS[None]).last_hidden_state @ held[head].T, expected)
        assert torch.equal(again.eval()(TOKENS[None]).logits, expected)
