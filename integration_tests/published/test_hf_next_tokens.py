"""Published folders, with and without what predicts further tokens, and models that have it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import published
from published import logits_of, same_tensors
from resuming import resume_and_save
from tables import table
from test_hf_families import NEMOTRON
from test_hf_folders import checkpoint, config_file
from test_oracle import on
from transformers import NemotronHConfig, NemotronHForCausalLM

from mimo.testing import Pool
from mimo.testing.comparison import tensors_of


def test_it_begins_new_and_is_left_out(tmp_path: Path, pool: Pool) -> None:
    """An import and a run that begins with one say so; an export names what it leaves out."""
    there = published.llama(tmp_path / "there", vocab_size=300)
    tables = tomllib.loads(checkpoint("import-hf", there))["modules"]
    tables["language"]["config"]["next_tokens"] = 1
    words = ("import-hf", there, "--config", config_file(tmp_path, tables), "--out", tmp_path / "ours")
    assert checkpoint(*words).startswith(
        f"language: llama from {there} for decoder, 21 tensors, float32 there and float32 here; "
        "not in it: next_tokens\n"
    )
    settings = table({"language": on(0, 0)})
    settings["modules"]["language"] |= tables["language"]
    settings["run"]["directory"] = str(tmp_path / "run")
    settings |= {"load": {"finetune": str(tmp_path / "ours")}}
    (found,) = pool.run(1, resume_and_save, settings, 1, 1)
    new = sum(name.startswith("language.next_tokens.") for name in found.began)
    assert f"new: weights of language ({new} entries)" in found.summary
    out = checkpoint("export-hf", tmp_path / "run", tmp_path / "back")
    assert "\nleft out, as llama has no place for it: next_tokens\n" in out
    assert tensors_of(tmp_path / "back").keys() == tensors_of(there).keys()


def test_nemotron_h_has_a_place_for_it(tmp_path: Path, pool: Pool) -> None:
    """Begun new, an export writes it, which `transformers` passes over and an import reads, to the bit."""
    keys: dict[str, Any] = {**NEMOTRON, "vocab_size": 300}
    there = published.publish(NemotronHForCausalLM(NemotronHConfig(**keys)), tmp_path / "there")
    tables = tomllib.loads(checkpoint("import-hf", there))["modules"]
    tables["language"]["config"]["next_tokens"] = 1
    file, begun, ours, back = (tmp_path / name for name in ("config", "begun", "ours", "back"))
    file.mkdir()
    words = ("--config", config_file(file, tables), "--out")
    assert "; not in it: next_tokens\n" in checkpoint("import-hf", there, *words, begun)
    settings = table({"language": on(0, 0)})
    settings["modules"]["language"] |= tables["language"]
    settings["run"]["directory"] = str(tmp_path / "run")
    settings |= {"load": {"finetune": str(begun)}}
    pool.run(1, resume_and_save, settings, 1, 1)
    assert "left out" not in checkpoint("export-hf", tmp_path / "run", back)
    new = tensors_of(back).keys() - tensors_of(there).keys()
    assert {name.partition(".layers.")[0] for name in new} == {"mtp"}
    assert logits_of(back, published.TOKENS).shape == (len(published.TOKENS), 300)
    assert "not in it" not in checkpoint("import-hf", back, *words, ours)
    checkpoint("export-hf", ours, tmp_path / "again")
    assert same_tensors(back, tmp_path / "again")
