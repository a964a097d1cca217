"""Published folders, which hold nothing that predicts further tokens, with models that have it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import published
from pool import Pool
from published import tensors_of
from resuming import go_on_and_save
from tables import table
from test_hf_folders import checkpoint, config_file
from test_oracle import on


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
    (found,) = pool.run(1, go_on_and_save, settings, 1, 1)
    new = sum(name.startswith("language.next_tokens.") for name in found.began)
    assert f"new: weights of language ({new} entries)" in found.told
    out = checkpoint("export-hf", tmp_path / "run", tmp_path / "back")
    assert "\nleft out, as llama has no place for it: next_tokens\n" in out
    assert tensors_of(tmp_path / "back").keys() == tensors_of(there).keys()
